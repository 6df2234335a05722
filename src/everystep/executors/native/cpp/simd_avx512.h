// Sixteen lanes in one 512-bit register. With VNNI a dot product of four bytes is one instruction.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace everystep::simd {

// How many sums the registers hold beside what is added to them.
constexpr int kSums = 24;

struct Floats {
    __m512 v;
};
struct Ints {
    __m512i v;
};
struct Bytes {
    __m512i v;
};

inline Floats load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, Floats a) { _mm512_storeu_ps(p, a.v); }
inline Floats splat(float x) { return {_mm512_set1_ps(x)}; }
// The same value, loaded by itself: the compiler would load it again wherever it is used.
inline Floats in_register(Floats a) {
    asm("" : "+v"(a.v));
    return a;
}
inline Floats add(Floats a, Floats b) { return {_mm512_add_ps(a.v, b.v)}; }
inline Floats sub(Floats a, Floats b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline Floats mul(Floats a, Floats b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline Floats div(Floats a, Floats b) { return {_mm512_div_ps(a.v, b.v)}; }
inline Floats max(Floats a, Floats b) { return {_mm512_max_ps(a.v, b.v)}; }
inline Floats min(Floats a, Floats b) { return {_mm512_min_ps(a.v, b.v)}; }
inline Floats abs(Floats a) { return {_mm512_abs_ps(a.v)}; }
inline Floats fma(Floats a, Floats b, Floats c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
inline float sum(Floats a) { return _mm512_reduce_add_ps(a.v); }
inline float largest(Floats a) { return _mm512_reduce_max_ps(a.v); }

inline Ints splat(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline Ints add(Ints a, Ints b) { return {_mm512_add_epi32(a.v, b.v)}; }
inline Ints mul(Ints a, Ints b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
template <int kBits>
inline Ints shifted_right(Ints a) {
    return {_mm512_srai_epi32(a.v, kBits)};
}
inline int32_t sum(Ints a) { return _mm512_reduce_add_epi32(a.v); }
inline Floats to_floats(Ints a) { return {_mm512_cvtepi32_ps(a.v)}; }
// To nearest, ties to even.
inline Ints round(Floats a) { return {_mm512_cvtps_epi32(a.v)}; }
inline Floats power_of_two(Ints n) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n.v, _mm512_set1_epi32(127)), 23))};
}
inline void store_bytes(int8_t* p, Ints a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v));
}
inline Floats load_halves(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline Floats load_brains(const uint16_t* p) {
    const __m256i brains = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(brains), 16))};
}
inline void store_halves(uint16_t* p, Floats a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
inline Ints load_ints(const int8_t* p) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline Floats load_codes(const int8_t* p) { return to_floats(load_ints(p)); }

inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline Bytes low_halves(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Bytes high_halves(Bytes a) {
    return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
// Codes of 4 bits with one or two more, which lie from bit `at` of a byte on.
inline Bytes with_high_bits(Bytes low, Bytes high, int at, int bits) {
    const __m512i own = _mm512_and_si512(_mm512_srli_epi16(high.v, at), _mm512_set1_epi8(2 * bits - 1));
    return {_mm512_or_si512(low.v, _mm512_slli_epi16(own, 4))};
}

// acc[lane] + sum over j < 4 of w[4 * lane + j] * a[j], with unsigned w and signed a, exactly.
inline Ints dot(Ints acc, Bytes w, const int8_t* a) {
    int32_t four;
    __builtin_memcpy(&four, a, 4);
#ifdef __AVX512VNNI__
    return {_mm512_dpbusd_epi32(acc.v, w.v, _mm512_set1_epi32(four))};
#else
    // Even and odd bytes apart as 16-bit numbers, whose pairs add up without saturation.
    const __m512i four16 = _mm512_set1_epi32(four);
    const __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(four16, 8), 8);
    const __m512i odd = _mm512_srai_epi16(four16, 8);
    const __m512i low = _mm512_and_si512(w.v, _mm512_set1_epi16(255));
    const __m512i high = _mm512_srli_epi16(w.v, 8);
    const __m512i both = _mm512_add_epi32(_mm512_madd_epi16(low, even), _mm512_madd_epi16(high, odd));
    return {_mm512_add_epi32(acc.v, both)};
#endif
}

}  // namespace everystep::simd
