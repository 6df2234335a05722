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
// sums widen once per block.
template <int M>
inline void half_of_nibbles(const uint8_t* codes, const int8_t* inputs, __m256i (&sums)[M]) {
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
    const __m256i one = _mm256_set1_epi16(1);
    for (int m = 0; m < M; ++m) sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(pairs[m], one));
}

// `acc[m]` grows by the products of the m-th row from `inputs` on.
template <bool kFourBits, int M>
inline void block_products(const uint8_t* codes, const int8_t* inputs, simd::Ints (&acc)[M]) {
    __m256i low[M], high[M];
    for (int m = 0; m < M; ++m) low[m] = acc[m].lo, high[m] = acc[m].hi;
    if constexpr (kFourBits) {
        half_of_nibbles<M>(codes, inputs, low);
        half_of_nibbles<M>(codes + 32, inputs, high);
    } else {
        half_of_bytes<M>(codes, inputs, low);
        half_of_bytes<M>(codes + 32, inputs, high);
    }
    for (int m = 0; m < M; ++m) acc[m] = {low[m], high[m]};
}

#else

constexpr int kByteOffset = 128;

template <bool kFourBits>
inline simd::Bytes column_group(const uint8_t* codes, int g) {
    if (!kFourBits) return simd::load_bytes(codes + g * 64);
    const simd::Bytes both = simd::load_bytes(codes + g % 4 * 64);
    return g < 4 ? simd::low_halves(both) : simd::high_halves(both);
}

// `acc[m]` grows by the products of the m-th row from `inputs` on.
template <bool kFourBits, int M>
inline void block_products(const uint8_t* codes, const int8_t* inputs, simd::Ints (&acc)[M]) {
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
        const simd::Bytes w = column_group<kFourBits>(codes, g);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) acc[m] = simd::dot(acc[m], w, inputs + m * kBlock + g * 4);
    }
}

#endif

}  // namespace everystep
