// What a step reports of attention itself: the weights with which queries mix the values they see.
#include "step.h"

namespace everystep {

// Writes the weights of all queries of a part for the feeds that want them.
void Runner::report_all(Member& member, const Part& part, const Sight& sight, int64_t index) {
    const Work& work = part.work;
    float* const* reports = sight.across ? work.across_attentions : work.attentions;
    if (!reports) return;
    crew_->share(member, part.tokens() * model_.heads, [&](int64_t number) {
        const int64_t token = number / model_.heads, head = number % model_.heads;
        const int64_t feed = part.feed_of[token], count = work.counts[feed];
        if (!reports[feed]) return;
        const int64_t length = sight.across ? work.across_counts[feed] : work.starts[feed] + count;
        const int64_t line =
            (index * model_.heads + head) * count + part.position_of[token] - work.starts[feed];
        float* out = reports[feed] + line * length;
        std::fill_n(out, length, 0.0f);
        report_weights(part, sight, index, token, head, out);
    });
}

// Writes the weights of one query head of a token. They are made anew, page after page, so that they
// depend on the row alone, and attention needs to know nothing of them.
void Runner::report_weights(const Part& part, const Sight& sight, int64_t index, int64_t token,
                            int64_t head, float* out) const {
    using namespace simd;
    const int64_t feed = part.feed_of[token], position = part.position_of[token];
    const Tile tile{feed, part.row_of[token], token, 1, position,
                    part.work.starts[feed] + part.work.counts[feed]};
    const Item item{tile, head / (model_.heads / model_.kv_heads), head, 1};
    std::vector<float> scaled(whole_vectors(model_.head_dim));
    const Queries queries = queries_of(part, item, sight, index, scaled.data());
    const Keys keys = keys_of(part, item, sight, index);
    const int64_t first = queries.first[0], last = queries.last[0], first_page = first / kPagePositions;
    const int64_t pages = last / kPagePositions - first_page + 1;
    std::vector<float> weights(pages * kPagePositions);
    Floats highest = splat(-__builtin_inff());
    for (int64_t page = 0; page < pages; ++page) {
        alignas(64) float scores[kSpan];
        with_type(keys.shape.type, [&](auto type) {
            page_scores<decltype(type), 1, 1>(keys, first_page + page, queries.values, false, scores);
        });
        const Floats s = final_scores(load(scores), queries, 0, first_page + page);
        write(weights.data() + page * kPagePositions, s, kLanes);
        highest = max(highest, s);
    }
    const Floats top = splat(largest(highest));
    Floats total = splat(0.0f);
    for (int64_t page = 0; page < pages; ++page) {
        float* at = weights.data() + page * kPagePositions;
        const Floats weight = exp(sub(read(at, kLanes), top));
        total = add(total, weight);
        write(at, weight, kLanes);
    }
    const float all = sum(total);
    for (int64_t at = first; at <= last; ++at) out[at] = weights[at - first_page * kPagePositions] / all;
}

}  // namespace everystep
