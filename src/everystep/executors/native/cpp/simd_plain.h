// Sixteen lanes in the vector type that compilers provide for any processor.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace everystep::simd {

// How many sums the registers hold beside what is added to them.
constexpr int kSums = 6;

typedef float Floats16 __attribute__((vector_size(64)));
typedef int32_t Ints16 __attribute__((vector_size(64)));
typedef uint32_t Words16 __attribute__((vector_size(64)));
typedef int8_t Codes16 __attribute__((vector_size(16)));

struct Floats {
    Floats16 v;
};
struct Ints {
    Ints16 v;
};
// Lane i holds bytes 4 i to 4 i + 3 of 64, lowest first.
struct Bytes {
    Words16 v;
};

template <class To, class From>
inline To with_bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline Floats load(const float* p) {
    Floats out;
    std::memcpy(&out.v, p, sizeof out.v);
    return out;
}
inline void store(float* p, Floats a) { std::memcpy(p, &a.v, sizeof a.v); }
inline Floats splat(float x) { return {x - Floats16{}}; }
inline Floats in_register(Floats a) { return a; }
inline Floats add(Floats a, Floats b) { return {a.v + b.v}; }
inline Floats sub(Floats a, Floats b) { return {a.v - b.v}; }
inline Floats mul(Floats a, Floats b) { return {a.v * b.v}; }
inline Floats div(Floats a, Floats b) { return {a.v / b.v}; }
inline Floats max(Floats a, Floats b) { return {a.v > b.v ? a.v : b.v}; }
inline Floats min(Floats a, Floats b) { return {a.v < b.v ? a.v : b.v}; }
inline Floats abs(Floats a) {
    return {with_bits<Floats16>(with_bits<Words16>(a.v) & 0x7fffffffu)};
}
// Rounds twice, unlike the instruction that others have: results differ between instruction sets.
inline Floats fma(Floats a, Floats b, Floats c) { return {a.v * b.v + c.v}; }
inline Floats where_less(Floats a, Floats b, Floats yes, Floats no) {
    return {a.v < b.v ? yes.v : no.v};
}
inline float sum(Floats a) {
    for (int step = 8; step > 0; step /= 2)
        for (int i = 0; i < step; ++i) a.v[i] += a.v[i + step];
    return a.v[0];
}
inline float largest(Floats a) {
    float most = a.v[0];
    for (int i = 1; i < 16; ++i) most = a.v[i] > most ? a.v[i] : most;
    return most;
}

inline Ints splat(int32_t x) { return {x - Ints16{}}; }
inline Ints add(Ints a, Ints b) { return {a.v + b.v}; }
inline Ints mul(Ints a, Ints b) { return {a.v * b.v}; }
template <int kBits>
inline Ints shifted_right(Ints a) {
    return {a.v >> kBits};
}
inline int32_t sum(Ints a) {
    int32_t total = 0;
    for (int i = 0; i < 16; ++i) total += a.v[i];
    return total;
}
inline Floats to_floats(Ints a) { return {__builtin_convertvector(a.v, Floats16)}; }
// To nearest, ties to even, of numbers below 2^22: adding 1.5 * 2^23 leaves no room for a fraction.
inline Ints round(Floats a) {
    const float shift = 12582912.0f;
    return {__builtin_convertvector((a.v + shift) - shift, Ints16)};
}
inline Floats power_of_two(Ints n) { return {with_bits<Floats16>((n.v + 127) << 23)}; }
inline void store_bytes(int8_t* p, Ints a) {
    const Ints16 bounded = a.v < -128 ? splat(int32_t{-128}).v : a.v > 127 ? splat(int32_t{127}).v : a.v;
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(bounded[i]);
}
inline Floats load_halves(const uint16_t* p) {
    Words16 h;
    for (int i = 0; i < 16; ++i) h[i] = p[i];
    // Exponents differ by 112, which a product of floats puts right for the tiniest halves too.
    const Floats16 finite = with_bits<Floats16>((h & 0x7fffu) << 13) * 5.192296858534828e33f;
    const Words16 endless = ((h & 0x7fffu) << 13) | 0x7f800000u;
    const Words16 bits = (h & 0x7c00u) == 0x7c00u ? endless : with_bits<Words16>(finite);
    return {with_bits<Floats16>(bits | (h & 0x8000u) << 16)};
}
inline Floats load_brains(const uint16_t* p) {
    Words16 bits;
    for (int i = 0; i < 16; ++i) bits[i] = uint32_t{p[i]} << 16;
    return {with_bits<Floats16>(bits)};
}
inline void store_halves(uint16_t* p, Floats a) {
    const Words16 sign = with_bits<Words16>(a.v) & 0x80000000u;
    const Words16 size = with_bits<Words16>(a.v) ^ sign;
    // Beside 0.5 a float has no place below the last one of the tiniest halves, and rounds there.
    const Words16 tiny = with_bits<Words16>(with_bits<Floats16>(size) + 0.5f) - 0x3f000000u;
    // Exponents differ by 112; what is added carries above one half of the last place, and at one
    // half where that place is odd.
    const Words16 usual = (size - 0x38000000u + 0xfffu + ((size >> 13) & 1u)) >> 13;
    const Words16 endless = size > 0x7f800000u ? Words16{} + 0x7e00u : Words16{} + 0x7c00u;
    const Words16 large = size < 0x47800000u ? usual : endless;
    const Words16 bits = (size < 0x38800000u ? tiny : large) | sign >> 16;
    for (int i = 0; i < 16; ++i) p[i] = static_cast<uint16_t>(bits[i]);
}
inline Ints load_ints(const int8_t* p) {
    Codes16 codes;
    std::memcpy(&codes, p, sizeof codes);
    return {__builtin_convertvector(codes, Ints16)};
}
inline Floats load_codes(const int8_t* p) { return to_floats(load_ints(p)); }

inline Bytes load_bytes(const uint8_t* p) {
    Bytes out;
    std::memcpy(&out.v, p, 64);
    return out;
}
inline Bytes low_halves(Bytes a) { return {a.v & 0x0f0f0f0fu}; }
inline Bytes high_halves(Bytes a) { return {(a.v >> 4) & 0x0f0f0f0fu}; }
// Codes of 4 bits with one or two more, which lie from bit `at` of a byte on.
inline Bytes with_high_bits(Bytes low, Bytes high, int at, int bits) {
    const uint32_t own = bits == 1 ? 0x01010101u : 0x03030303u;
    return {low.v | ((high.v >> at) & own) << 4};
}

// acc[lane] + sum over j < 4 of w[4 * lane + j] * a[j], with unsigned w and signed a, exactly.
inline Ints dot(Ints acc, Bytes w, const int8_t* a) {
    for (int j = 0; j < 4; ++j)
        acc.v += with_bits<Ints16>((w.v >> (8 * j)) & 255u) * int32_t{a[j]};
    return acc;
}

}  // namespace everystep::simd
