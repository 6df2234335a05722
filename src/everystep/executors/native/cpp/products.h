// Exact products of a block of 32 columns, as integers: the inner loop of everything that is packed.
#pragma once

#include <algorithm>
#include <type_traits>

#include "pack.h"
#include "simd.h"

namespace everystep {

#if defined(__AVX2__) && !defined(__AVX512BW__)

inline __m256i four_codes(const int8_t* at) {
    int32_t four;
    __builtin_memcpy(&four, at, 4);
    return _mm256_set1_epi32(four);
}

// The products of half a panel, 8 outputs, with the codes of M rows. A product of bytes adds pairs
// up as 16 bits, which a whole byte times 127 would overflow: bytes are taken in halves of 4 bits,
// 8 pairs of which fit into 16 bits (8 * 2 * 15 * 127 = 30480). So sums widen once per block.
template <bool kFourBits, int M>
inline void half_products(const uint8_t* codes, const int8_t* inputs, __m256i (&sums)[M]) {
    constexpr int kGroups = kFourBits ? 4 : 8;
    const __m256i four_bits = _mm256_set1_epi8(15);
    __m256i low[M], high[M];
    for (int m = 0; m < M; ++m) low[m] = high[m] = _mm256_setzero_si256();
    // Not unrolled: the compiler would put the sums of all columns in another order, for which there
    // are not enough registers.
#pragma GCC unroll 1
    for (int g = 0; g < kGroups; ++g) {
        const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + g * 64));
        const __m256i lower = _mm256_and_si256(both, four_bits);
        const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(both, 4), four_bits);
#pragma GCC unroll 8
        for (int m = 0; m < M; ++m) {
            const int8_t* at = inputs + m * kBlock + g * 4;
            const __m256i input = four_codes(at);
            low[m] = _mm256_add_epi16(low[m], _mm256_maddubs_epi16(lower, input));
            const __m256i other = kFourBits ? four_codes(at + kBlock / 2) : input;
            __m256i& sum = kFourBits ? low[m] : high[m];
            sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(upper, other));
        }
    }
    const __m256i one = _mm256_set1_epi16(1), sixteen = _mm256_set1_epi16(16);
    for (int m = 0; m < M; ++m) {
        sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(low[m], one));
        if (!kFourBits) sums[m] = _mm256_add_epi32(sums[m], _mm256_madd_epi16(high[m], sixteen));
    }
}

// `acc[m]` grows by the products of the m-th row from `inputs` on. Two sums for each of 3 rows, or one
// for each of 6, are as many as the compiler keeps in registers.
template <bool kFourBits, int M>
inline void block_products(const uint8_t* codes, const int8_t* inputs, simd::Ints (&acc)[M]) {
    constexpr int kFew = kFourBits ? std::min(M, 6) : std::min(M, 3);
    static_assert(M % kFew == 0 || M % kFew == 1);
    const auto rows = [&](auto count, int first) {
        __m256i low[count], high[count];
        for (int m = 0; m < count; ++m) low[m] = acc[first + m].lo, high[m] = acc[first + m].hi;
        half_products<kFourBits, count>(codes, inputs + first * kBlock, low);
        half_products<kFourBits, count>(codes + 32, inputs + first * kBlock, high);
        for (int m = 0; m < count; ++m) acc[first + m] = {low[m], high[m]};
    };
#pragma GCC unroll 2
    for (int first = 0; first + kFew <= M; first += kFew)
        rows(std::integral_constant<int, kFew>(), first);
    if constexpr (M % kFew == 1) rows(std::integral_constant<int, 1>(), M - 1);
}

#else

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
