// Attention of a few queries over the pages of one row and one key head.
//
// A page holds 16 positions of a row, from a multiple of 16 on. Per layer and key head it has the
// keys with positions side by side, (dim, 16), so that a lane is a key and no sum crosses lanes, then
// the values, (16, dim in whole vectors). Keys are added up in the order of their positions,
// whatever is fed together, so a result depends on the row's own keys and on nothing else.
#pragma once

#include "simd.h"

namespace everystep {

constexpr int64_t kPagePositions = simd::kLanes;
constexpr int kMostQueries = 8;

inline int64_t whole_vectors(int64_t n) { return (n + simd::kLanes - 1) / simd::kLanes * simd::kLanes; }

struct PageShape {
    int64_t kv_heads, dim;

    int64_t keys() const { return dim * kPagePositions; }
    int64_t head() const { return keys() + kPagePositions * whole_vectors(dim); }
    int64_t layer() const { return kv_heads * head(); }
};

// The pages of a row, and where its layer and key head begin in each.
struct Keys {
    float* const* pages;
    const int32_t* numbers;
    int64_t offset;
    PageShape shape;

    float* keys(int64_t page) const { return pages[numbers[page]] + offset; }
    float* values(int64_t page) const { return keys(page) + shape.keys(); }
};

inline void write_position(const Keys& to, int64_t position, const float* key, const float* value) {
    const int64_t page = position / kPagePositions, lane = position % kPagePositions;
    float* keys = to.keys(page) + lane;
    for (int64_t d = 0; d < to.shape.dim; ++d) keys[d * kPagePositions] = key[d];
    float* values = to.values(page) + lane * whole_vectors(to.shape.dim);
    __builtin_memcpy(values, value, to.shape.dim * sizeof(float));
}

// Query i sees the positions [first[i], last[i]]; queries are scaled and `whole_vectors(dim)` apart.
struct Queries {
    int count;
    float* values;
    int64_t first[kMostQueries], last[kMostQueries];
    float softcap;
};

template <int Q>
inline void page_scores(const float* keys, int64_t dim, const float* queries, int64_t apart,
                        float* scores, int64_t stride) {
    using namespace simd;
    Floats acc[Q];
#pragma GCC unroll 8
    for (int i = 0; i < Q; ++i) acc[i] = splat(0.0f);
    for (int64_t d = 0; d < dim; ++d) {
        const Floats key = load(keys + d * kPagePositions);
#pragma GCC unroll 8
        for (int i = 0; i < Q; ++i) acc[i] = fma(key, splat(queries[i * apart + d]), acc[i]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < Q; ++i) store(scores + i * stride, acc[i]);
}

inline simd::Floats seen_only(simd::Floats scores, int64_t page, int64_t first, int64_t last) {
    using namespace simd;
    const int64_t start = page * kPagePositions;
    if (start >= first && start + kPagePositions - 1 <= last) return scores;
    alignas(64) static const float lanes[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Floats lane = load(lanes), never = splat(-__builtin_inff());
    // Distances beyond a page say no more than its edges do, and stay exact as floats.
    const int64_t low = first - start < 0 ? 0 : first - start > 16 ? 16 : first - start;
    const int64_t high = last - start > 15 ? 15 : last - start < -1 ? -1 : last - start;
    const Floats late = where_less(splat(float(high)), lane, never, scores);
    return where_less(lane, splat(float(low)), never, late);
}

// Scores become weights that sum to the returned number; those of unseen positions are zeros.
inline float weigh(float* scores, int64_t first_page, int64_t last_page, const Queries& queries, int i) {
    using namespace simd;
    Floats highest = splat(-__builtin_inff());
    for (int64_t page = first_page; page <= last_page; ++page) {
        float* at = scores + (page - first_page) * kPagePositions;
        Floats s = load(at);
        if (queries.softcap != 0)
            s = mul(tanh(div(s, splat(queries.softcap))), splat(queries.softcap));
        s = seen_only(s, page, queries.first[i], queries.last[i]);
        store(at, s);
        highest = max(highest, s);
    }
    const Floats top = splat(largest(highest));
    Floats total = splat(0.0f);
    for (int64_t page = first_page; page <= last_page; ++page) {
        float* at = scores + (page - first_page) * kPagePositions;
        const Floats weight = exp(sub(load(at), top));
        store(at, weight);
        total = add(total, weight);
    }
    return sum(total);
}

// Adds up `V` vectors of the values, from `column` on, for Q queries.
template <int Q, int V>
inline void mix_columns(const Keys& keys, int64_t first_page, int64_t last, int64_t column,
                        const float* weights, int64_t stride, const float* shares, float* out,
                        int64_t apart) {
    using namespace simd;
    const int64_t width = whole_vectors(keys.shape.dim);
    Floats acc[Q][V];
#pragma GCC unroll 8
    for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[i][v] = splat(0.0f);
    for (int64_t page = first_page; page <= last / kPagePositions; ++page) {
        const float* values = keys.values(page) + column;
        const float* w = weights + (page - first_page) * kPagePositions;
        const int64_t left = last - page * kPagePositions + 1;
        const int64_t count = left < kPagePositions ? left : kPagePositions;
        for (int64_t j = 0; j < count; ++j) {
            Floats value[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) value[v] = load(values + j * width + v * kLanes);
#pragma GCC unroll 8
            for (int i = 0; i < Q; ++i) {
                const Floats share = splat(w[i * stride + j]);
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) acc[i][v] = fma(value[v], share, acc[i][v]);
            }
        }
    }
    for (int i = 0; i < Q; ++i)
        for (int v = 0; v < V; ++v)
            store(out + i * apart + column + v * kLanes, mul(acc[i][v], splat(shares[i])));
}

// Replaces the queries by what they see. `scratch`: room for Q rows of whole pages.
template <int Q>
inline void attend_tile(const Keys& keys, Queries& queries, float* scratch) {
    const int64_t width = whole_vectors(keys.shape.dim);
    int64_t first = queries.first[0], last = queries.last[0];
    for (int i = 1; i < Q; ++i) {
        if (queries.first[i] < first) first = queries.first[i];
        if (queries.last[i] > last) last = queries.last[i];
    }
    const int64_t first_page = first / kPagePositions, last_page = last / kPagePositions;
    const int64_t stride = (last_page - first_page + 1) * kPagePositions;
    for (int64_t page = first_page; page <= last_page; ++page)
        page_scores<Q>(keys.keys(page), keys.shape.dim, queries.values, width,
                       scratch + (page - first_page) * kPagePositions, stride);
    float shares[Q];
    for (int i = 0; i < Q; ++i)
        shares[i] = 1.0f / weigh(scratch + i * stride, first_page, last_page, queries, i);
    constexpr int kVectors = Q <= 6 ? 4 : 2;
    int64_t column = 0;
    for (; column + kVectors * simd::kLanes <= width; column += kVectors * simd::kLanes)
        mix_columns<Q, kVectors>(keys, first_page, last, column, scratch, stride, shares,
                                 queries.values, width);
    for (; column < width; column += simd::kLanes)
        mix_columns<Q, 1>(keys, first_page, last, column, scratch, stride, shares, queries.values, width);
}

inline void attend(const Keys& keys, Queries& queries, float* scratch) {
    switch (queries.count) {
        case 1: return attend_tile<1>(keys, queries, scratch);
        case 2: return attend_tile<2>(keys, queries, scratch);
        case 3: return attend_tile<3>(keys, queries, scratch);
        case 4: return attend_tile<4>(keys, queries, scratch);
        case 5: return attend_tile<5>(keys, queries, scratch);
        case 6: return attend_tile<6>(keys, queries, scratch);
        case 7: return attend_tile<7>(keys, queries, scratch);
        default: return attend_tile<8>(keys, queries, scratch);
    }
}

}  // namespace everystep
