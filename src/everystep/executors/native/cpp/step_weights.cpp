// What a step reports of attention itself: the weights with which queries mix the values of their row.
#include "step.h"

namespace everystep {

// Writes the weights of a query head of a token for its feed, if that wants them. They are made anew,
// page after page, so that they depend on the row alone, and attention needs to know nothing of them.
void Runner::report_weights(const Part& part, int64_t index, int64_t token, int64_t head) const {
    using namespace simd;
    const Work& work = part.work;
    const int64_t feed = part.feed_of[token], position = part.position_of[token];
    const int64_t count = work.counts[feed], start = work.starts[feed], length = start + count;
    if (!work.attentions[feed]) return;
    const int64_t key_head = head / (model_.heads / model_.kv_heads);
    const Tile tile{part.row_of[token], token, 1, position};
    std::vector<float> scaled(whole_vectors(model_.head_dim));
    const Queries queries = queries_of({tile, key_head, head, 1}, index, scaled.data());
    const Keys keys = keys_of(numbers_of(part, tile.row), index, key_head);
    const int64_t first = queries.first[0], first_page = first / kPagePositions;
    const int64_t pages = position / kPagePositions - first_page + 1;
    std::vector<float> weights(pages * kPagePositions);
    Floats highest = splat(-__builtin_inff());
    for (int64_t page = 0; page < pages; ++page) {
        alignas(64) float scores[kSpan];
        with_type(keys.shape.type, [&](auto type) {
            page_scores<decltype(type), 1, 1>(keys, first_page + page, queries.values, false, scores);
        });
        Floats s = load(scores);
        if (queries.softcap != 0)
            s = mul(tanh(div(s, splat(queries.softcap))), splat(queries.softcap));
        s = seen_only(s, first_page + page, first, position);
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
    const int64_t line = (index * model_.heads + head) * count + position - start;
    float* out = work.attentions[feed] + line * length;
    std::fill_n(out, length, 0.0f);
    for (int64_t at = first; at <= position; ++at)
        out[at] = weights[at - first_page * kPagePositions] / all;
}

}  // namespace everystep
