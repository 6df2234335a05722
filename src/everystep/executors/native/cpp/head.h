// The end of a step: what is reported of each wanted position, all logits or only the best of them.
//
// Logits come in groups of columns, each digested by the member that computed it while it is in
// the cache. The best are put in one order, so it does not matter who saw which; exponentials are
// summed by group, and groups by column. So what is reported of a position depends on its logits alone.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "portable.h"
#include "rows.h"

namespace everystep {

// A wanted position, and where what is reported of it goes.
struct Wanted {
    int64_t token;    // among the tokens of the work
    int64_t best;     // how many of the best
    float* logits;    // (vocabulary,), or null; also beside the best
    float* values;    // (best,), best first
    int64_t* tokens;  // (best,)
    float* total;     // the logarithm of the sum of exponentials, or null
    float* hidden;    // (width,) after the last norm, or null
};

struct Candidate {
    float value;
    int64_t token;
};

// Higher ones first, of equals the lower token; a NaN counts as the highest.
inline bool stands_before(const Candidate& a, const Candidate& b) {
    if (std::isnan(a.value) != std::isnan(b.value)) return std::isnan(a.value);
    if (a.value > b.value || a.value < b.value) return a.value > b.value;
    return a.token < b.token;
}

// The best of what was offered, in order.
class BestList {
  public:
    // Makes all the room there is: members of a crew must not fail.
    void start(int64_t most) {
        most_ = most;
        held_.clear();
        held_.reserve(most);
    }
    // Whether a value that no NaN is among may have to be offered.
    bool may_take(float value) const {
        return int64_t(held_.size()) < most_ || !(value < held_.back().value);
    }
    void offer(Candidate one) {
        if (int64_t(held_.size()) == most_) {
            if (!stands_before(one, held_.back())) return;
            held_.pop_back();
        }
        held_.insert(std::upper_bound(held_.begin(), held_.end(), one, stands_before), one);
    }
    const std::vector<Candidate>& held() const { return held_; }

  private:
    int64_t most_ = 0;
    std::vector<Candidate> held_;
};

class Head {
  public:
    static constexpr int64_t kColumns = 512;

    // Room for `rows` of `wanted` and so many members.
    void start(const Wanted* wanted, int64_t rows, int64_t vocabulary, int members) {
        wanted_ = wanted;
        rows_ = rows;
        vocabulary_ = vocabulary;
        groups_ = (vocabulary + kColumns - 1) / kColumns;
        members_ = members;
        fit(room_, members * rows * kColumns);
        fit(highest_, rows * groups_);
        fit(sums_, rows * groups_);
        fit(best_, members * rows);
        for (int64_t i = 0; i < members * rows; ++i) best_[i].start(wanted[i % rows].best);
    }

    int64_t groups() const { return groups_; }

    // Where a member puts the logits of a group's columns.
    float* place(int member, int64_t row, int64_t group) {
        float* logits = wanted_[row].logits;
        return logits ? logits + group * kColumns
                      : room_.data() + (member * rows_ + row) * kColumns;
    }

    // A member has put all logits of a group of columns into their places.
    void digest(int member, int64_t group) {
        const int64_t first = group * kColumns, count = std::min(kColumns, vocabulary_ - first);
        for (int64_t row = 0; row < rows_; ++row) {
            const float* values = place(member, row, group);
            if (wanted_[row].best > 0) offer_all(best_[member * rows_ + row], values, count, first);
            if (wanted_[row].total) add_up(values, count, row * groups_ + group);
        }
    }

    // All groups of a row are digested: what is reported of it is written.
    void report(int64_t row) {
        const Wanted& to = wanted_[row];
        if (to.best > 0) {
            BestList& all = best_[row];
            for (int member = 1; member < members_; ++member)
                for (const Candidate& one : best_[member * rows_ + row].held()) all.offer(one);
            for (int64_t i = 0; i < to.best; ++i) {
                to.values[i] = all.held()[i].value;
                to.tokens[i] = all.held()[i].token;
            }
        }
        if (to.total) *to.total = total(row);
    }

  private:
    static constexpr int64_t kAtOnce = 4 * simd::kLanes;

    template <class T>
    static void fit(std::vector<T>& held, int64_t size) {
        if (int64_t(held.size()) < size) held.resize(size);
    }

    // Sixty-four values at a time are passed over where none of them can be among the best.
    static void offer_all(BestList& best, const float* values, int64_t count, int64_t first) {
        using namespace simd;
        for (int64_t at = 0; at < count; at += kAtOnce) {
            const int64_t end = std::min(at + kAtOnce, count);
            bool look = end - at < kAtOnce;
            if (!look) {
                const Floats a = load(values + at), b = load(values + at + kLanes);
                const Floats c = load(values + at + 2 * kLanes), d = load(values + at + 3 * kLanes);
                // A sum with a NaN is one; a maximum may lose it.
                look = best.may_take(largest(max(max(a, b), max(c, d)))) ||
                       std::isnan(sum(add(add(a, b), add(c, d))));
            }
            for (int64_t i = at; look && i < end; ++i)
                if (best.may_take(values[i])) best.offer({values[i], first + i});
        }
    }

    void add_up(const float* values, int64_t count, int64_t place) {
        using namespace simd;
        constexpr float kNothing = -std::numeric_limits<float>::infinity();
        float last[kLanes];
        const auto read = [&](int64_t at, int n) {
            if (n == kLanes) return load(values + at);
            for (int i = 0; i < kLanes; ++i) last[i] = i < n ? values[at + i] : kNothing;
            return load(last);
        };
        Floats highest = splat(kNothing), total = splat(0.0f);
        each_vector(count, [&](int64_t at, int n) { highest = max(highest, read(at, n)); });
        const float most = largest(highest);
        const Floats from = splat(most == kNothing ? 0.0f : most);
        each_vector(count, [&](int64_t at, int n) {
            total = add(total, exp(sub(read(at, n), from)));
        });
        highest_[place] = most;
        sums_[place] = sum(total);
    }

    float total(int64_t row) const {
        const float* highest = highest_.data() + row * groups_;
        const float most = *std::max_element(highest, highest + groups_);
        double all = 0;
        for (int64_t group = 0; group < groups_; ++group)
            all += sums_[row * groups_ + group] * std::exp(double(highest[group]) - most);
        return float(most + std::log(all));
    }

    const Wanted* wanted_ = nullptr;
    int64_t rows_ = 0, vocabulary_ = 0, groups_ = 0;
    int members_ = 1;
    std::vector<float> room_;           // (members, rows, columns)
    std::vector<float> highest_, sums_;  // (rows, groups)
    std::vector<BestList> best_;        // (members, rows)
};

}  // namespace everystep
