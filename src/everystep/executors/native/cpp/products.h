// Exact products of a block of 32 columns, as integers: the inner loop of everything that is packed.
#pragma once

#include <algorithm>
#include <type_traits>

#include "pack.h"
#include "simd.h"

namespace everystep {

#if defined(__AVX2__) && !defined(__AVX512BW__)

// What 8-bit codes have been added to them when they are multiplied.
constexpr int kByteOffset = 0;

inline __m256i four_codes(const int8_t* at) {
    int32_t four;
    __builtin_memcpy(&four, at, 4);
    return _mm256_set1_epi32(four);
}

// `sums[m]` grows by the products of half a panel, 8 outputs, with the codes of the m-th row. A product
// of bytes adds pairs up as 16 bits, which hold 2 * 128 * 127, but not 2 * 255 * 127: so a weight gives
// its size, and its sign to the input.
template <int M>
inline void half_of_bytes(const uint8_t* codes, const int8_t* inputs, __m256i (&sums)[M]) {
    const __m256i half = _mm256_set1_epi8(-128), one = _mm256_set1_epi16(1);
    // Not unrolled: the compiler would put the sums of all columns in another order, for which there
    // are not enough registers.
#pragma GCC unroll 1
    for (int g = 0; g < 8; ++g) {
        const __m256i stored = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + g * 64));
        const __m256i weights = _mm256_xor_si256(stored, half), sizes = _mm256_abs_epi8(weights);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            const __m256i input = _mm256_sign_epi8(four_codes(inputs + m * kBlock + g * 4), weights);
            sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(_mm256_maddubs_epi16(sizes, input), one));
        }
    }
}

// The same for codes of 4 bits, 8 pairs of which fit into 16 bits (8 * 2 * 15 * 127 = 30480): their
// sums widen once per block, and are multiplied by the pairs of 16 bits `by`.
template <int M>
inline void half_of_nibbles(const uint8_t* codes, const int8_t* inputs, __m256i by,
                            __m256i (&sums)[M]) {
    const __m256i four_bits = _mm256_set1_epi8(15);
    __m256i pairs[M];
    for (int m = 0; m < M; ++m) pairs[m] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int g = 0; g < 4; ++g) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + g * 64));
        const __m256i lower = _mm256_and_si256(both, four_bits);
        const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(both, 4), four_bits);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            const int8_t* at = inputs + m * kBlock + g * 4;
            pairs[m] = _mm256_add_epi16(pairs[m], _mm256_maddubs_epi16(lower, four_codes(at)));
            pairs[m] = _mm256_add_epi16(pairs[m], _mm256_maddubs_epi16(upper, four_codes(at + kBlock / 2)));
        }
    }
    for (int m = 0; m < M; ++m) sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(pairs[m], by));
}

// What lies above the four lower bits of a group's codes, at its place; `high`: the bits of several
// groups, those of the first lowest.
template <int kHighBits, int kGroup>
inline __m256i above_four_bits(__m256i high) {
    constexpr int kBy = 4 - kHighBits * kGroup;
    const __m256i there = kBy >= 0 ? _mm256_slli_epi16(high, std::max(kBy, 0))
                                   : _mm256_srli_epi16(high, std::max(-kBy, 0));
    return _mm256_and_si256(there, _mm256_set1_epi8(kHighBits == 2 ? 0x30 : 0x10));
}

// Calls `use(g, above)` for four groups, with what lies above their lower bits. With few rows there are
// registers enough to do all at once.
template <int kHighBits, int M, class Use>
inline void each_group(__m256i high, Use use) {
    if constexpr (M <= 2) {
        use(0, above_four_bits<kHighBits, 0>(high));
        use(1, above_four_bits<kHighBits, 1>(high));
        use(2, above_four_bits<kHighBits, 2>(high));
        use(3, above_four_bits<kHighBits, 3>(high));
    } else {
#pragma GCC unroll 1
        for (int g = 0; g < 4; ++g, high = _mm256_srli_epi16(high, kHighBits))
            use(g, above_four_bits<kHighBits, 0>(high));
    }
}

// The four lower bits of a group's codes: of the first 16 columns of a block or of the others.
template <bool kOthers>
inline __m256i four_bits_of(const uint8_t* codes, int g) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + g * 64));
    return _mm256_and_si256(kOthers ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
}

// The same for 16 columns, the first or the others of a block, of codes of 5 bits, or for more than two
// rows of 6 bits less 32. Of either, 4 pairs fit into 16 bits (4 * 2 * 31 * 127 = 31496, 4 * 2 * 32 * 127
// = 32512).
template <int kHighBits, bool kOthers, int M>
inline void half_of_high_codes(const uint8_t* codes, const int8_t* inputs, __m256i by,
                               __m256i (&sums)[M]) {
    const __m256i middle = _mm256_set1_epi8(32);
    const uint8_t* plane = codes + 256 + (kHighBits == 2 && kOthers ? 64 : 0);
    __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(plane));
    if (kHighBits == 1 && kOthers) high = _mm256_srli_epi16(high, 4);
    __m256i pairs[M];
    for (int m = 0; m < M; ++m) pairs[m] = _mm256_setzero_si256();
    each_group<kHighBits, M>(high, [&](int g, __m256i above) {
        __m256i weights = _mm256_or_si256(four_bits_of<kOthers>(codes, g), above), sizes = weights;
        if (kHighBits == 2) weights = _mm256_sub_epi8(weights, middle), sizes = _mm256_abs_epi8(weights);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            __m256i input = four_codes(inputs + m * kBlock + (kOthers ? 16 : 0) + g * 4);
            if (kHighBits == 2) input = _mm256_sign_epi8(input, weights);
            pairs[m] = _mm256_add_epi16(pairs[m], _mm256_maddubs_epi16(sizes, input));
        }
    });
    for (int m = 0; m < M; ++m) sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(pairs[m], by));
}

// The same for one or two rows of codes of 6 bits as they are, 2 pairs of which fit (2 * 2 * 63 * 127 =
// 32004). `back`: half of what the 32 make of the inputs, which comes twice.
template <bool kOthers, int M>
inline void half_of_six_bits(const uint8_t* codes, const int8_t* inputs, const int32_t (&back)[M],
                             __m256i by, __m256i (&sums)[M]) {
    const uint8_t* plane = codes + (kOthers ? 320 : 256);
    __m256i pairs[M];
    for (int m = 0; m < M; ++m)
        sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(_mm256_set1_epi16(int16_t(back[m])), by));
    each_group<2, M>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(plane)), [&](int g, __m256i above) {
        const __m256i weights = _mm256_or_si256(four_bits_of<kOthers>(codes, g), above);
        for (int m = 0; m < M; ++m) {
            const int8_t* at = inputs + m * kBlock + (kOthers ? 16 : 0) + g * 4;
            const __m256i products = _mm256_maddubs_epi16(weights, four_codes(at));
            pairs[m] = g % 2 ? _mm256_add_epi16(pairs[m], products) : products;
            if (g % 2) sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(pairs[m], by));
        }
    });
}

// 8 scales, each of them twice.
inline __m256i pairs_of_scales(const int8_t* parts) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(parts));
    const __m256i wide = _mm256_cvtepi8_epi32(bytes);
    return _mm256_blend_epi16(wide, _mm256_slli_epi32(wide, 16), 0xaa);
}

// `sums[m]` grows by the products of half a block with super-blocks around it, times their scales.
// `back`: of codes of 6 bits what is taken back of each row, for the first columns and for the others.
template <class Kind, int M>
inline void half_of_parts(const uint8_t* codes, const int8_t* parts, const int8_t* inputs,
                          const int32_t (&back)[2][M], __m256i (&sums)[M]) {
    const __m256i by = pairs_of_scales(parts);
    if constexpr (Kind::kBits == 4) {
        half_of_nibbles<M>(codes, inputs, by, sums);
    } else {
        const __m256i others = Kind::kMins ? by : pairs_of_scales(parts + kPanel);
        if constexpr (Kind::kBits == 6 && M <= 2) {
            half_of_six_bits<false, M>(codes, inputs, back[0], by, sums);
            half_of_six_bits<true, M>(codes, inputs, back[1], others, sums);
        } else {
            half_of_high_codes<Kind::kBits - 4, false, M>(codes, inputs, by, sums);
            half_of_high_codes<Kind::kBits - 4, true, M>(codes, inputs, others, sums);
        }
    }
}

// `acc[m]` grows by the products of the m-th row from `inputs` on, times the scales of their parts.
// `offsets`, `firsts`: what takes back the 32 that codes without minimums have been added.
template <class Kind, int M>
inline void scaled_products(const uint8_t* codes, const int8_t* parts, const int8_t* inputs,
                            const int32_t* offsets, const int32_t* firsts, simd::Ints (&acc)[M]) {
    __m256i low[M], high[M];
    int32_t back[2][M] = {};
    for (int m = 0; m < M; ++m) low[m] = acc[m].lo, high[m] = acc[m].hi;
    if (Kind::kBits == 6 && M <= 2)
        for (int m = 0; m < M; ++m) back[0][m] = firsts[m] / 2, back[1][m] = (offsets[m] / 4 - firsts[m]) / 2;
    half_of_parts<Kind, M>(codes, parts, inputs, back, low);
    half_of_parts<Kind, M>(codes + 32, parts + 8, inputs, back, high);
    for (int m = 0; m < M; ++m) acc[m] = {low[m], high[m]};
}

// `acc[m]` grows by the products of the m-th row from `inputs` on.
template <int kBits, int M>
inline void block_products(const uint8_t* codes, const int8_t* inputs, simd::Ints (&acc)[M]) {
    const __m256i one = _mm256_set1_epi16(1);
    const auto half = [&](const uint8_t* at, __m256i (&sums)[M]) {
        if constexpr (kBits == 8) {
            half_of_bytes<M>(at, inputs, sums);
        } else if constexpr (kBits == 4) {
            half_of_nibbles<M>(at, inputs, one, sums);
        } else {
            half_of_high_codes<kBits - 4, false, M>(at, inputs, one, sums);
            half_of_high_codes<kBits - 4, true, M>(at, inputs, one, sums);
        }
    };
    __m256i low[M], high[M];
    for (int m = 0; m < M; ++m) low[m] = acc[m].lo, high[m] = acc[m].hi;
    half(codes, low);
    half(codes + 32, high);
    for (int m = 0; m < M; ++m) acc[m] = {low[m], high[m]};
}

#else

constexpr int kByteOffset = 128;

// Four columns of all lanes, of codes of so many bits.
template <int kBits>
inline simd::Bytes column_group(const uint8_t* codes, int g) {
    if constexpr (kBits == 8) return simd::load_bytes(codes + g * 64);
    const simd::Bytes both = simd::load_bytes(codes + g % 4 * 64);
    const simd::Bytes low = g < 4 ? simd::low_halves(both) : simd::high_halves(both);
    if constexpr (kBits == 4) return low;
    const simd::Bytes high = simd::load_bytes(codes + 256 + (kBits == 6 ? g / 4 * 64 : 0));
    return simd::with_high_bits(low, high, kBits == 6 ? 2 * (g % 4) : g, kBits - 4);
}

// `acc[m]` grows by the products of the m-th row from `inputs` on.
template <int kBits, int M>
inline void block_products(const uint8_t* codes, const int8_t* inputs, simd::Ints (&acc)[M]) {
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
        const simd::Bytes w = column_group<kBits>(codes, g);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) acc[m] = simd::dot(acc[m], w, inputs + m * kBlock + g * 4);
    }
}

// `acc[m]` grows by the products of the m-th row from `inputs` on, times the scales of their parts.
// `offsets`, `firsts`: what takes back the 32 that codes without minimums have been added.
template <class Kind, int M>
inline void scaled_products(const uint8_t* codes, const int8_t* parts, const int8_t* inputs,
                            const int32_t* offsets, const int32_t* firsts, simd::Ints (&acc)[M]) {
    using namespace simd;
    constexpr int kParts = Kind::kMins ? 1 : 2, kGroups = 8 / kParts;
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
        Ints sums[M];
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            const int32_t back = part == 0 ? firsts[m] : offsets[m] / 4 - firsts[m];
            sums[m] = splat(Kind::kMins ? 0 : back);
        }
#pragma GCC unroll 8
        for (int g = part * kGroups; g < (part + 1) * kGroups; ++g) {
            const Bytes w = column_group<Kind::kBits>(codes, g);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) sums[m] = dot(sums[m], w, inputs + m * kBlock + g * 4);
        }
        const Ints by = load_ints(parts + part * kPanel);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) acc[m] = add(acc[m], mul(sums[m], by));
    }
}

#endif

}  // namespace everystep
