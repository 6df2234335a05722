// What happens to one row of values by itself: norms, rotation, activations.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "model.h"
#include "simd.h"

namespace everystep {

// Calls `use(at, count)` for every vector of a row, the last one with fewer values perhaps.
template <class Use>
inline void each_vector(int64_t size, Use use) {
    for (int64_t at = 0; at < size; at += simd::kLanes)
        use(at, size - at < simd::kLanes ? int(size - at) : simd::kLanes);
}
inline simd::Floats read(const float* p, int count) {
    return count == simd::kLanes ? simd::load(p) : simd::load_first(p, count);
}
inline void write(float* p, simd::Floats a, int count) {
    if (count == simd::kLanes)
        simd::store(p, a);
    else
        simd::store_first(p, a, count);
}

inline void add_to(float* sum, const float* x, int64_t size) {
    each_vector(size, [&](int64_t at, int n) {
        write(sum + at, simd::add(read(sum + at, n), read(x + at, n)), n);
    });
}

// What a row of scores comes to: the lowest and the highest, and over all of them e^d and d e^d, where
// d is how far a score lies above the highest. A NaN is one in both sums.
inline void sum_up(const float* scores, int64_t size, double* out) {
    using namespace simd;
    constexpr int64_t kBlock = 64 * kLanes;  // few enough for sums of floats
    const int64_t whole = size / kLanes * kLanes;
    const Floats none = splat(-std::numeric_limits<float>::infinity()), zero = splat(0.0f);
    Floats highest = none, lowest = none;
    for (int64_t at = 0; at < whole; at += kLanes) {
        const Floats own = load(scores + at);
        highest = max(highest, own);
        lowest = max(lowest, sub(zero, own));
    }
    float most = largest(highest), least = -largest(lowest);
    for (int64_t at = whole; at < size; ++at) {
        most = std::max(most, scores[at]);
        least = std::min(least, scores[at]);
    }
    double mass = 0, weighed = 0;
    for (int64_t first = 0; first < whole; first += kBlock) {
        Floats sums = zero, products = zero;
        for (int64_t at = first; at < std::min(first + kBlock, whole); at += kLanes) {
            const Floats above = sub(load(scores + at), splat(most)), share = exp(above);
            sums = add(sums, share);
            products = fma(share, above, products);
        }
        mass += sum(sums);
        weighed += sum(products);
    }
    for (int64_t at = whole; at < size; ++at) {
        const double above = double(scores[at]) - most, share = std::exp(above);
        mass += share;
        weighed += share * above;
    }
    out[0] = least;
    out[1] = most;
    out[2] = mass;
    out[3] = weighed;
}

inline void rms_norm(const float* x, int64_t size, float eps, const Norm& norm, float* out) {
    using namespace simd;
    Floats squares = splat(0.0f);
    each_vector(size, [&](int64_t at, int n) {
        const Floats part = read(x + at, n);
        squares = fma(part, part, squares);
    });
    const Floats scale = splat(1.0f / std::sqrt(sum(squares) / float(size) + eps));
    each_vector(size, [&](int64_t at, int n) {
        write(out + at, mul(read(norm.weight + at, n), mul(read(x + at, n), scale)), n);
    });
}

inline void layer_norm(const float* x, int64_t size, float eps, const Norm& norm, float* out) {
    using namespace simd;
    Floats total = splat(0.0f), squares = splat(0.0f);
    each_vector(size, [&](int64_t at, int n) { total = add(total, read(x + at, n)); });
    const float mean = sum(total) / float(size);
    float away[kLanes];
    each_vector(size, [&](int64_t at, int n) {
        for (int i = 0; i < kLanes; ++i) away[i] = i < n ? x[at + i] - mean : 0.0f;
        squares = fma(load(away), load(away), squares);
    });
    const Floats scale = splat(1.0f / std::sqrt(sum(squares) / float(size) + eps));
    each_vector(size, [&](int64_t at, int n) {
        const Floats centred = mul(sub(read(x + at, n), splat(mean)), scale);
        const Floats bias = norm.bias ? read(norm.bias + at, n) : splat(0.0f);
        write(out + at, fma(centred, read(norm.weight + at, n), bias), n);
    });
}

inline void normalise(NormKind kind, const float* x, int64_t size, float eps, const Norm& norm,
                      float* out) {
    if (kind == NormKind::kRms)
        rms_norm(x, size, eps, norm, out);
    else
        layer_norm(x, size, eps, norm, out);
}

// Turns the first `dim` values of a head.
inline void rotate(float* head, int64_t dim, const float* cos, const float* sin) {
    using namespace simd;
    const int64_t half = dim / 2;
    float* other = head + half;
    each_vector(half, [&](int64_t at, int n) {
        const Floats low = read(head + at, n), high = read(other + at, n);
        write(head + at, fma(high, read(sin + at, n), mul(low, read(cos + at, n))), n);
        write(other + at, fma(low, read(sin + half + at, n), mul(high, read(cos + half + at, n))), n);
    });
}

inline simd::Floats activate(Activation kind, simd::Floats x) {
    using namespace simd;
    const Floats one = splat(1.0f), half = splat(0.5f);
    switch (kind) {
        case Activation::kSilu: return div(x, add(one, exp(sub(splat(0.0f), x))));
        case Activation::kGeluTanh: {
            const Floats inner = mul(fma(mul(x, mul(x, x)), splat(0.044715f), x), splat(0.7978845608f));
            return mul(mul(half, x), add(one, tanh(inner)));
        }
        case Activation::kGelu:
            return mul(mul(half, x), add(one, erf(mul(x, splat(0.70710678f)))));
        // The order of the arguments lets a NaN through.
        default: return max(splat(0.0f), x);
    }
}

}  // namespace everystep
