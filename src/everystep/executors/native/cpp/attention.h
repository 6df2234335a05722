// Attention of a few queries over the pages of one row and one key head.
//
// Four pages are a span, from a multiple of 64 positions on: what a query sees of each span is found
// by itself, and spans are joined in their order. So spans may be given to different threads, and a
// result depends on the row's own keys and on nothing else.
#pragma once

#include <algorithm>
#include <type_traits>

#include "pages.h"

namespace everystep {

constexpr int64_t kSpanPages = 4, kSpan = kSpanPages * kPagePositions;
constexpr int kMostQueries = 12;

// Lines of memory that are wanted soon, to be fetched while there is something else to do: the first
// keys of a span, of two pages side by side.
class Ahead {
  public:
    Ahead() = default;
    Ahead(const Keys& keys, int64_t page, int64_t last) : left_(keys.shape.keys() / kLine) {
        for (int p = 0; p < 2; ++p) at_[p] = keys.at(std::min(page + p, last));
    }

    // A few lines more.
    void fetch() {
        for (int64_t i = std::min(left_, kPagePositions); i > 0; --i, --left_)
            for (const uint8_t*& at : at_) {
                __builtin_prefetch(at);
                at += kLine;
            }
    }

  private:
    static constexpr int64_t kLine = 64;
    const uint8_t* at_[2] = {nullptr, nullptr};
    int64_t left_ = 0;
};

// Query i, which stands at position at[i], sees the positions [first[i], last[i]]; queries are scaled
// and `whole_vectors(dim)` apart. `fetch`: the keys and values are in no cache yet. `distances[i]`: what
// is added to scores of keys `reach` before it to `reach` after it, or null.
struct Queries {
    int count;
    const float* values;
    int64_t at[kMostQueries], first[kMostQueries], last[kMostQueries];
    const float* distances[kMostQueries];
    int64_t reach;
    float softcap;
    bool fetch;

    int64_t first_seen() const { return *std::min_element(first, first + count); }
    int64_t last_seen() const { return *std::max_element(last, last + count); }
};

// What a query has seen: a sum of values with weights e^(score - highest), and the sum of weights.
// It lies in memory as the values in whole vectors, then the two numbers.
struct Seen {
    float* at;
    int64_t width;

    static int64_t size(int64_t width) { return width + simd::kLanes; }
    float& highest() const { return at[width]; }
    float& total() const { return at[width + 1]; }
};

// Calls `use(count, first)` for Q queries, as many at once as have sums in the registers.
template <int Q, class Use>
inline void each_few(Use use) {
    constexpr int kFew = std::min(Q, simd::kSums), kRest = Q % kFew;
    for (int first = 0; first + kFew <= Q; first += kFew) use(std::integral_constant<int, kFew>(), first);
    if constexpr (kRest > 0) use(std::integral_constant<int, kRest>(), Q - kRest);
}

// How many sums each of Q queries may have, `most` at most.
constexpr int sums_each(int queries, int most) {
    return most > 1 && queries * most > simd::kSums ? sums_each(queries, most / 2) : most;
}

// Scores of P pages of keys, one after another, with Q queries from `values` on.
template <class Type, int Q, int P>
inline void page_scores(const Keys& keys, int64_t page, const float* values, bool fetch,
                        float* scores) {
    using namespace simd;
    const int64_t dim = keys.shape.dim, apart = whole_vectors(dim);
    const typename Type::Number* from[P];
    constexpr int64_t kLine = 64 / sizeof(*from[0]);
    Floats acc[Q][P];
#pragma GCC unroll 2
    for (int p = 0; p < P; ++p) {
        from[p] = keys.keys<Type>(page + p);
#pragma GCC unroll 12
        for (int i = 0; i < Q; ++i) acc[i][p] = splat(0.0f);
    }
    for (int64_t d = 0; d < dim; ++d) {
        Floats key[P];
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) {
            const auto* at = from[p] + d * kPagePositions;
            key[p] = Type::load(at);
            // Values lie behind the keys.
            if (fetch && d * kPagePositions % kLine == 0)
                __builtin_prefetch(at + dim * kPagePositions);
        }
#pragma GCC unroll 12
        for (int i = 0; i < Q; ++i) {
            const Floats query = splat(values[i * apart + d]);
#pragma GCC unroll 2
            for (int p = 0; p < P; ++p) acc[i][p] = fma(key[p], query, acc[i][p]);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < Q; ++i)
#pragma GCC unroll 2
        for (int p = 0; p < P; ++p) {
            if (Type::kScaled) acc[i][p] = mul(acc[i][p], load(keys.key_scales(page + p)));
            store(scores + i * kSpan + p * kPagePositions, acc[i][p]);
        }
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

// What is added to a query's scores of a page for how far away its keys are.
inline simd::Floats for_distance(const Queries& queries, int i, int64_t page) {
    const int64_t first = page * kPagePositions - queries.at[i] + queries.reach;
    const int64_t last = 2 * queries.reach;
    if (first >= 0 && first + kPagePositions - 1 <= last) return simd::load(queries.distances[i] + first);
    float added[simd::kLanes];
    for (int64_t lane = 0; lane < simd::kLanes; ++lane)
        added[lane] = queries.distances[i][std::clamp<int64_t>(first + lane, 0, last)];
    return simd::load(added);
}

// Scores of a page as they are compared: capped, with what distances add, those of unseen positions
// endlessly low.
inline simd::Floats final_scores(simd::Floats scores, const Queries& queries, int i, int64_t page) {
    using namespace simd;
    if (queries.softcap != 0)
        scores = mul(tanh(div(scores, splat(queries.softcap))), splat(queries.softcap));
    if (queries.distances[i]) scores = add(scores, for_distance(queries, i, page));
    return seen_only(scores, page, queries.first[i], queries.last[i]);
}

// Scores become weights, and in a scaled type weights of codes; those of unseen positions are zeros.
template <class Type>
inline void weigh(const Keys& keys, float* scores, int64_t first_page, int64_t pages,
                  const Queries& queries, int i, Seen seen) {
    using namespace simd;
    Floats highest = splat(-__builtin_inff());
    for (int64_t page = 0; page < pages; ++page) {
        const Floats s =
            final_scores(load(scores + page * kPagePositions), queries, i, first_page + page);
        store(scores + page * kPagePositions, s);
        highest = max(highest, s);
    }
    const float most = largest(highest);
    seen.highest() = most;
    const Floats top = splat(most == -__builtin_inff() ? 0.0f : most);
    Floats total = splat(0.0f);
    for (int64_t page = 0; page < pages; ++page) {
        const Floats weight = exp(sub(load(scores + page * kPagePositions), top));
        total = add(total, weight);
        store(scores + page * kPagePositions,
              Type::kScaled ? mul(weight, load(keys.value_scales(first_page + page))) : weight);
    }
    seen.total() = sum(total);
}

// Adds up `V` vectors of the values, from `column` on, for Q queries.
template <class Type, int Q, int V>
inline void mix_columns(const Keys& keys, int64_t first_page, int64_t last, int64_t column,
                        const float* weights, Seen seen, Ahead& ahead) {
    using namespace simd;
    const int64_t width = whole_vectors(keys.shape.dim);
    Floats acc[Q][V];
#pragma GCC unroll 12
    for (int i = 0; i < Q; ++i)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[i][v] = splat(0.0f);
    for (int64_t page = first_page; page <= last / kPagePositions; ++page) {
        ahead.fetch();
        const auto* values = keys.values<Type>(page) + column;
        const float* w = weights + (page - first_page) * kPagePositions;
        const int64_t count = std::min(last - page * kPagePositions + 1, kPagePositions);
        for (int64_t j = 0; j < count; ++j) {
            Floats value[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) value[v] = Type::load(values + j * width + v * kLanes);
#pragma GCC unroll 12
            for (int i = 0; i < Q; ++i) {
                const Floats share = splat(w[i * kSpan + j]);
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v) acc[i][v] = fma(value[v], share, acc[i][v]);
            }
        }
    }
    for (int i = 0; i < Q; ++i)
        for (int v = 0; v < V; ++v)
            store(seen.at + i * Seen::size(width) + column + v * kLanes, acc[i][v]);
}

// What Q queries see from page `first` to position `last` of one span; `seen` is that of the first
// query, the others follow.
template <class Type, int Q>
inline void attend_tile(const Keys& keys, const Queries& queries, int64_t first, int64_t last,
                        Seen seen, Ahead ahead) {
    alignas(64) float scores[Q * kSpan];
    const int64_t pages = last / kPagePositions - first + 1;
    each_few<Q>([&](auto count, int i) {
        const float* values = queries.values + i * whole_vectors(keys.shape.dim);
        const bool fetch = queries.fetch && i == 0;
        // Two pages at once, if they can be, whose sums do not wait for each other.
        constexpr int kPages = sums_each(count, 2);
        int64_t page = 0;
        const auto pages_of = [&](auto together) {
            for (; page + together <= pages; page += together)
                page_scores<Type, count, together>(keys, first + page, values, fetch,
                                                   scores + i * kSpan + page * kPagePositions);
        };
        pages_of(std::integral_constant<int, kPages>());
        if constexpr (kPages > 1) pages_of(std::integral_constant<int, 1>());
    });
    const int64_t width = seen.width;
    for (int i = 0; i < Q; ++i)
        weigh<Type>(keys, scores + i * kSpan, first, pages, queries, i,
                    {seen.at + i * Seen::size(width), width});
    each_few<Q>([&](auto count, int i) {
        const Seen few{seen.at + i * Seen::size(width), width};
        constexpr int kVectors = sums_each(count, 4);
        int64_t column = 0;
        for (; column + kVectors * simd::kLanes <= width; column += kVectors * simd::kLanes)
            mix_columns<Type, count, kVectors>(keys, first, last, column, scores + i * kSpan, few, ahead);
        for (; column < width; column += simd::kLanes)
            mix_columns<Type, count, 1>(keys, first, last, column, scores + i * kSpan, few, ahead);
    });
}

// Attends with the kernel for as many queries as there are.
template <class Type, int Q = kMostQueries>
inline void attend_as(const Keys& keys, const Queries& queries, int64_t first, int64_t last, Seen seen,
                      Ahead ahead) {
    if constexpr (Q > 1)
        if (queries.count < Q) return attend_as<Type, Q - 1>(keys, queries, first, last, seen, ahead);
    attend_tile<Type, Q>(keys, queries, first, last, seen, ahead);
}

inline void attend(const Keys& keys, const Queries& queries, int64_t span, Seen seen, Ahead ahead) {
    const int64_t first = std::max(span * kSpanPages, queries.first_seen() / kPagePositions);
    const int64_t last = std::min(span * kSpan + kSpan - 1, queries.last_seen());
    with_type(keys.shape.type, [&](auto type) {
        attend_as<decltype(type)>(keys, queries, first, last, seen, ahead);
    });
}

// What a query has seen of `spans` spans, which lie `apart`, becomes what it has seen of all, in place
// of the first. Every span counts by e^(its highest - the highest of all).
inline void join(Seen first, int64_t spans, int64_t apart) {
    using namespace simd;
    const auto span = [&](int64_t i) { return Seen{first.at + i * apart, first.width}; };
    float top = first.highest(), total = 0.0f;
    for (int64_t i = 1; i < spans; ++i) top = std::max(top, span(i).highest());
    for (int64_t begin = 0; begin < spans; begin += kLanes) {
        const int64_t count = std::min<int64_t>(spans - begin, kLanes);
        float shares[kLanes] = {};
        for (int64_t i = 0; i < count; ++i) shares[i] = span(begin + i).highest() - top;
        store(shares, exp(load(shares)));
        for (int64_t i = 0; i < count; ++i) total += span(begin + i).total() * shares[i];
        for (int64_t at = 0; at < first.width; at += kLanes) {
            Floats sum = begin == 0 ? splat(0.0f) : load(first.at + at);
            for (int64_t i = 0; i < count; ++i)
                sum = fma(load(span(begin + i).at + at), splat(shares[i]), sum);
            store(first.at + at, sum);
        }
    }
    first.highest() = top;
    first.total() = total;
}

// Joins the spans of a query and writes the mean of the values.
inline void conclude(Seen seen, int64_t spans, int64_t apart, int64_t dim, float* out) {
    if (spans > 1) join(seen, spans, apart);
    const float share = 1.0f / seen.total();
    for (int64_t d = 0; d < dim; ++d) out[d] = seen.at[d] * share;
}

}  // namespace everystep
