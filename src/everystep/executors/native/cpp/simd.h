// The vector type of the instruction set that this translation unit is compiled for: sixteen lanes
// everywhere, so that every kernel is written once. A kernel file is compiled once per set.
#pragma once

#if defined(__AVX512BW__)
#include "simd_avx512.h"
#elif defined(__AVX2__)
#include "simd_avx2.h"
#else
#include "simd_plain.h"
#endif

namespace everystep::simd {

constexpr int kLanes = 16;

inline Floats load_first(const float* p, int count) {
    float padded[kLanes] = {};
    for (int i = 0; i < count; ++i) padded[i] = p[i];
    return load(padded);
}
inline void store_first(float* p, Floats a, int count) {
    float all[kLanes];
    store(all, a);
    for (int i = 0; i < count; ++i) p[i] = all[i];
}

// e^x to the last bits of a float; 0 below the smallest normal number, infinity beyond the largest.
inline Floats exp(Floats x) {
    const Floats lowest = splat(-87.33654f), highest = splat(88.72283f);
    // The order of the arguments lets a NaN through: both return the second one for it.
    const Floats bounded = min(highest, max(lowest, x));
    const Ints n = round(mul(bounded, splat(1.44269504f)));
    Floats r = fma(to_floats(n), splat(-0.693359375f), bounded);
    r = fma(to_floats(n), splat(2.12194440e-4f), r);
    Floats p = splat(1.9875691500e-4f);
    for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                          5.0000001201e-1f})
        p = fma(p, r, splat(c));
    p = add(fma(p, mul(r, r), r), splat(1.0f));
    // 2^128 does not exist: the power is taken in two halves.
    const Ints half = round(mul(to_floats(n), splat(0.4999f)));
    const Ints rest = round(sub(to_floats(n), to_floats(half)));
    const Floats e = mul(mul(p, power_of_two(half)), power_of_two(rest));
    const Floats above = where_less(highest, x, splat(__builtin_inff()), e);
    return where_less(x, lowest, splat(0.0f), above);
}

inline Floats tanh(Floats x) {
    // 1 - 2 / (e^2x + 1); near zero the subtraction would lose everything, and x is exact enough.
    const Floats wide = sub(splat(1.0f), div(splat(2.0f), add(exp(add(x, x)), splat(1.0f))));
    const Floats x2 = mul(x, x);
    const Floats near = mul(x, fma(x2, fma(x2, splat(0.13333333f), splat(-0.33333333f)), splat(1.0f)));
    return where_less(abs(x), splat(0.04f), near, wide);
}

// log(1 + e^x). The logarithm is 2 artanh(z), whose series is short where z is at most 1/3.
inline Floats softplus(Floats x) {
    const Floats u = exp(sub(splat(0.0f), abs(x)));
    const Floats z = div(u, add(splat(2.0f), u)), z2 = mul(z, z);
    Floats p = splat(1.0f / 15);
    for (const float c : {1.0f / 13, 1.0f / 11, 1.0f / 9, 1.0f / 7, 1.0f / 5, 1.0f / 3, 1.0f})
        p = fma(p, z2, splat(c));
    // The order of the arguments lets a NaN through.
    return fma(add(z, z), p, max(splat(0.0f), x));
}

// Within 3e-7. Source: Abramowitz and Stegun 1964, 7.1.26.
inline Floats erf(Floats x) {
    const Floats size = abs(x), one = splat(1.0f);
    const Floats t = div(one, fma(size, splat(0.3275911f), one));
    Floats p = splat(1.061405429f);
    for (const float c : {-1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f})
        p = fma(p, t, splat(c));
    const Floats found = sub(one, mul(mul(p, t), exp(sub(splat(0.0f), mul(x, x)))));
    return where_less(x, splat(0.0f), sub(splat(0.0f), found), found);
}

}  // namespace everystep::simd
