// Which rows an expert multiplies: each row chooses its experts, and rows are put in their order.
//
// An expert that no row chose does not occur. What a row adds up comes in the order of its experts'
// numbers, so no result depends on the rows beside it.
#pragma once

#include <atomic>
#include <utility>
#include <vector>

#include "head.h"
#include "linear.h"

namespace everystep {

// An expert that `count` rows chose. They stand from `place` on, in ascending order.
struct ChosenExpert {
    int64_t number, place, count;
};

class Routing {
  public:
    // Makes all the room that so many rows need: members of a crew must not fail.
    void expect(const Experts& experts, int64_t rows) {
        fit(logits_, rows * experts.count);
        fit(choices_, rows * experts.chosen);
        fit(next_, experts.count);
        chosen_.reserve(experts.count);
        const int64_t places = most_places(experts, rows);
        fit(rows_, places);
        fit(shares_, places);
    }

    // Rows that are computed together are whole groups, which leaves places empty.
    static int64_t most_places(const Experts& experts, int64_t rows) {
        const int64_t pairs = rows * experts.chosen;
        return pairs + std::min(experts.count, pairs / (kTogether + 1)) * (kTogether - 1);
    }

    // Where the router puts what it says of a row.
    float* logits(const Experts& experts, int64_t row) {
        return logits_.data() + row * experts.count;
    }

    // The router has said all of a row: of equal experts the first are chosen.
    void choose(const Experts& experts, int64_t row) {
        const float* logits = this->logits(experts, row);
        Candidate* best = choices_.data() + row * experts.chosen;
        int64_t held = 0;
        for (int64_t number = 0; number < experts.count; ++number) {
            const Candidate one{logits[number], number};
            if (held == experts.chosen && !stands_before(one, best[held - 1])) continue;
            int64_t at = held < experts.chosen ? held++ : held - 1;
            for (; at > 0 && stands_before(one, best[at - 1]); --at) best[at] = best[at - 1];
            best[at] = one;
        }
        // Probabilities, of which those of the chosen add up to 1 where they are normalised.
        const float highest = best[0].value;
        float chosen = 0;
        for (int64_t i = 0; i < experts.chosen; ++i) {
            best[i].value = power(best[i].value - highest);
            chosen += best[i].value;
        }
        const float total = experts.normalised ? chosen : powers(logits, experts.count, highest);
        for (int64_t i = 0; i < experts.chosen; ++i) best[i].value /= total;
    }

    // All rows have chosen.
    void put_in_order(const Experts& experts, int64_t rows) {
        const Candidate* end = choices_.data() + rows * experts.chosen;
        std::fill_n(next_.begin(), experts.count, 0);
        for (const Candidate* one = choices_.data(); one != end; ++one) ++next_[one->token];
        chosen_.clear();
        int64_t place = 0;
        for (int64_t number = 0; number < experts.count; ++number) {
            const int64_t count = std::exchange(next_[number], place);
            if (count == 0) continue;
            chosen_.push_back({number, place, count});
            place += count > kTogether ? whole_groups(count) : count;
        }
        for (int64_t i = 0; i < rows * experts.chosen; ++i) {
            const int64_t at = next_[choices_[i].token]++;
            rows_[at] = i / experts.chosen;
            shares_[at] = choices_[i].value;
        }
        num_read_ += int64_t(chosen_.size());
    }

    const std::vector<ChosenExpert>& chosen() const { return chosen_; }
    int64_t row_at(int64_t place) const { return rows_[place]; }
    float share_at(int64_t place) const { return shares_[place]; }

    // How many experts were read in all.
    int64_t num_read() const { return num_read_; }

  private:
    // e^x, as all instruction sets compute it.
    static float power(float x) {
        float lanes[simd::kLanes];
        simd::store(lanes, simd::exp(simd::splat(x)));
        return lanes[0];
    }
    // The sum of e^(x - highest).
    static float powers(const float* x, int64_t count, float highest) {
        using namespace simd;
        Floats total = splat(0.0f);
        each_vector(count, [&](int64_t at, int n) {
            float own[kLanes] = {};
            write(own, exp(sub(read(x + at, n), splat(highest))), n);
            total = add(total, load(own));
        });
        return sum(total);
    }

    template <class T>
    static void fit(std::vector<T>& held, int64_t size) {
        if (int64_t(held.size()) < size) held.resize(size);
    }

    std::vector<float> logits_;       // (rows, experts)
    std::vector<Candidate> choices_;  // (rows, chosen), best first
    std::vector<int64_t> next_;       // (experts,)
    std::vector<ChosenExpert> chosen_;
    std::vector<int64_t> rows_;   // (places,)
    std::vector<float> shares_;   // (places,)
    // Told while others may be ahead.
    std::atomic<int64_t> num_read_{0};
};

// The rows of one expert by themselves, with as many columns as it reads.
inline Inputs rows_of(const ChosenExpert& one, const Inputs& all, int64_t columns) {
    const int64_t at = one.place * all.blocks;
    return {all.values + one.place * all.columns,
            columns,
            blocks_of(columns),
            std::min(one.count, kTogether),
            all.codes + at * kBlock,
            all.scales + at,
            all.offsets + at,
            all.sums + at,
            all.firsts + at};
}

// The codes of a row become those of another.
inline void copy_codes(const Inputs& from, int64_t row, const Inputs& to, int64_t other) {
    for (int64_t block = 0; block < from.blocks; ++block) {
        const int64_t a = from.at(row, block), b = to.at(other, block);
        std::copy_n(from.codes + a * kBlock, kBlock, to.codes + b * kBlock);
        to.scales[b] = from.scales[a];
        to.offsets[b] = from.offsets[a];
        to.sums[b] = from.sums[a];
        to.firsts[b] = from.firsts[a];
    }
}

}  // namespace everystep
