// The kernels of every format of weights: 16 outputs of a few rows, and a row of an embedding table.
//
// They take most of the time of compiling, so they are compiled here and nowhere else.
#include <algorithm>
#include <cstring>

#include "linear.h"
#include "products.h"

namespace everystep {

// How a quantised format is read. `kOffset`: what was added to every code, taken back by the offsets
// of the inputs. `kRowScales`: one scale per row instead of one per block.
struct Int8 {
    static constexpr bool kMins = false, kRowScales = true;
    static constexpr int kBits = 8, kOffset = kByteOffset;
};
struct Q8 {
    static constexpr bool kMins = false, kRowScales = false;
    static constexpr int kBits = 8, kOffset = kByteOffset;
};
struct Q4 {
    static constexpr bool kMins = false, kRowScales = false;
    static constexpr int kBits = 4, kOffset = 8;
};
struct Q4Min {
    static constexpr bool kMins = true, kRowScales = false;
    static constexpr int kBits = 4, kOffset = 0;
};
struct Q5 {
    static constexpr bool kMins = false, kRowScales = false;
    static constexpr int kBits = 5, kOffset = 16;
};

// How a format with super-blocks is read. Without minimums codes have 32 added to them, and a block has
// two parts with a scale each.
struct Q4K {
    static constexpr bool kMins = true;
    static constexpr int kBits = 4;
};
struct Q5K {
    static constexpr bool kMins = true;
    static constexpr int kBits = 5;
};
struct Q6K {
    static constexpr bool kMins = false;
    static constexpr int kBits = 6;
};

// What the products of a block begin with.
template <int kOffset>
inline simd::Ints first_sum(const int32_t* offset) {
    if constexpr (kOffset == 0) return simd::splat(int32_t{0});
    static_assert(kOffset == 0 || kOffset == 8 || kOffset == 16 || kOffset == 128);
    return simd::shifted_right<kOffset == 8 ? 4 : kOffset == 16 ? 3 : 0>(simd::splat(*offset));
}

template <class Kind, int M>
__attribute__((noinline)) void tile_of_codes(const uint8_t* panel, const float* row_scales,
                                             const Inputs& in, int64_t row, simd::Floats* out) {
    using namespace simd;
    const int64_t blocks = in.blocks, bytes = block_bytes(Kind::kBits);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(panel + blocks * bytes);
    const uint16_t* mins = scales + blocks * kPanel;
    Floats acc[M];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) acc[m] = splat(0.0f);
    // Few rows wait for memory: while the first of them read a panel, the next one is fetched.
    const bool ahead = row == 0;
    constexpr int64_t kBlockBytes =
        block_bytes(Kind::kBits) + (Kind::kRowScales ? 0 : 32) + (Kind::kMins ? 32 : 0);
    const uint8_t* next = panel + (blocks * kBlockBytes + 63) / 64 * 64;
    for (int64_t b = 0, at = in.at(row, 0); b < blocks; ++b, at += in.together) {
        if (ahead)
            for (int64_t i = 0; i < kBlockBytes; i += 64) __builtin_prefetch(next + b * kBlockBytes + i);
        Ints dots[M];
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) dots[m] = first_sum<Kind::kOffset>(in.offsets + at + m);
        block_products<Kind::kBits, M>(panel + b * bytes, in.codes + at * kBlock, dots);
        const Floats w_scale = Kind::kRowScales ? load(row_scales) : load_halves(scales + b * kPanel);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            const Floats scale = mul(w_scale, splat(in.scales[at + m]));
            acc[m] = fma(to_floats(dots[m]), scale, acc[m]);
        }
        if (Kind::kMins) {
            const Floats least = load_halves(mins + b * kPanel);
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) acc[m] = fma(least, splat(in.sums[at + m]), acc[m]);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) out[m] = acc[m];
}

// The same for super-blocks. The products of a part with its scale are integers below 2^24, so that a
// block's are exact in float as well.
template <class Kind, int M>
__attribute__((noinline)) void tile_of_super_blocks(const uint8_t* panel, const Inputs& in, int64_t row,
                                                    simd::Floats* out) {
    using namespace simd;
    constexpr int64_t kCodes = block_bytes(Kind::kBits), kParts = Kind::kMins ? 1 : 2;
    const int64_t blocks = in.blocks;
    const int8_t* parts = reinterpret_cast<const int8_t*>(panel + blocks * kCodes);
    const int8_t* least = parts + blocks * kPanel;
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(parts + 2 * blocks * kPanel);
    const uint16_t* mins = scales + blocks / kSuperBlock * kPanel;
    Floats acc[M];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) acc[m] = splat(0.0f);
    const bool ahead = row == 0;
    constexpr int64_t kBlockBytes = kCodes + (Kind::kMins ? 40 : 36);
    const uint8_t* next = panel + (blocks * kBlockBytes + 63) / 64 * 64;
    for (int64_t b = 0, at = in.at(row, 0); b < blocks; ++b, at += in.together) {
        if (ahead)
            for (int64_t i = 0; i < kBlockBytes; i += 64) __builtin_prefetch(next + b * kBlockBytes + i);
        Ints dots[M];
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) dots[m] = splat(int32_t{0});
        scaled_products<Kind, M>(panel + b * kCodes, parts + b * kParts * kPanel, in.codes + at * kBlock,
                                 in.offsets + at, in.firsts + at, dots);
        const int64_t super = b / kSuperBlock * kPanel;
        const Floats by = load_halves(scales + super);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m)
            acc[m] = fma(to_floats(dots[m]), mul(by, splat(in.scales[at + m])), acc[m]);
        if (Kind::kMins) {
            const Floats below = mul(load_halves(mins + super), load_codes(least + b * kPanel));
#pragma GCC unroll 16
            for (int m = 0; m < M; ++m) acc[m] = fma(below, splat(-in.sums[at + m]), acc[m]);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) out[m] = acc[m];
}

// A column of a panel of floats, exactly.
template <Format kFormat>
inline simd::Floats read_column(const uint8_t* panel, int64_t column) {
    const uint8_t* at = panel + column * kPanel * float_bytes(kFormat);
    if constexpr (kFormat == Format::kFloat) return simd::load(reinterpret_cast<const float*>(at));
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(at);
    return kFormat == Format::kHalf ? simd::load_halves(halves) : simd::load_brains(halves);
}

// How many bytes before their use floats are fetched.
constexpr int64_t kAhead = 4096;

template <Format kFormat, int M>
__attribute__((noinline)) void tile_of_floats(const uint8_t* panel, const Inputs& in, int64_t row, simd::Floats* out) {
    using namespace simd;
    const float* x = in.values + row * in.columns;
    Floats acc[M];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) acc[m] = splat(0.0f);
    constexpr int64_t kColumn = kPanel * float_bytes(kFormat);
    for (int64_t k = 0; k < in.columns; ++k) {
        if (row == 0) __builtin_prefetch(panel + k * kColumn + kAhead);
        const Floats column = read_column<kFormat>(panel, k);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) acc[m] = fma(column, splat(x[m * in.columns + k]), acc[m]);
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) out[m] = acc[m];
}

template <Format kFormat, int M>
__attribute__((noinline)) void tile_of_two_panels(const uint8_t* panel, const uint8_t* other, const Inputs& in,
                                                  int64_t row, simd::Floats* out, simd::Floats* others) {
    using namespace simd;
    const float* x = in.values + row * in.columns;
    Floats acc[M], acc_of_other[M];
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) acc[m] = acc_of_other[m] = splat(0.0f);
    constexpr int64_t kColumn = kPanel * float_bytes(kFormat);
    for (int64_t k = 0; k < in.columns; ++k) {
        if (row == 0) {
            __builtin_prefetch(panel + k * kColumn + kAhead);
            __builtin_prefetch(other + k * kColumn + kAhead);
        }
        const Floats column = read_column<kFormat>(panel, k), column_of_other = read_column<kFormat>(other, k);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
            const Floats input = in_register(splat(x[m * in.columns + k]));
            acc[m] = fma(column, input, acc[m]);
            acc_of_other[m] = fma(column_of_other, input, acc_of_other[m]);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; ++m) out[m] = acc[m], others[m] = acc_of_other[m];
}

// Columns of a matrix that is read as a whole before another one is: further ones are fetched early.
constexpr int64_t kLong = 128;

// The sums of M rows over C neighbouring pieces, which are computed at once: a single sum would wait for
// itself.
template <Format kFormat, int M, int C>
inline void sums_of_pieces(const uint8_t* panel, const float* const (&x)[M], Pieces pieces, int64_t first,
                           simd::Floats (&out)[C][M]) {
    using namespace simd;
    constexpr int64_t kColumn = kPanel * float_bytes(kFormat);
    int64_t begins[C], least = pieces.columns;
    const int64_t ahead = pieces.columns >= kLong ? 2 * kAhead : kAhead / 2;
    for (int c = 0; c < C; ++c) {
        begins[c] = pieces.begin(first + c);
        least = std::min(least, pieces.begin(first + c + 1) - begins[c]);
    }
    Floats acc[C][M];
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) acc[c][m] = splat(0.0f);
    const auto add = [&](int c, int64_t k) {
        __builtin_prefetch(panel + k * kColumn + ahead);
        const Floats column = read_column<kFormat>(panel, k);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) acc[c][m] = fma(column, splat(x[m][k]), acc[c][m]);
    };
    for (int64_t k = 0; k < least; ++k)
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) add(c, begins[c] + k);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c) {
        for (int64_t k = begins[c] + least; k < pieces.begin(first + c + 1); ++k) add(c, k);
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) out[c][m] = acc[c][m];
    }
}

template <Format kFormat, int M>
inline void tile_of_pieces(const uint8_t* panel, const float* const (&x)[M], Pieces pieces, int64_t first,
                           int64_t last, simd::Floats* out) {
    // Two places of a long matrix would be read from memory at once, which is slower than one.
    constexpr bool kPairs = (simd::kSums > 8 ? 16 : 4) >= 2 * M;
    bool begun = false;
    const auto take = [&](auto count) {
        simd::Floats sums[count][M];
        sums_of_pieces<kFormat, M, count>(panel, x, pieces, first, sums);
        for (int c = 0; c < count; ++c)
            for (int m = 0; m < M; ++m) out[m] = begun || c ? simd::add(out[m], sums[c][m]) : sums[c][m];
        begun = true, first += count;
    };
    if constexpr (kPairs)
        while (last - first >= 2 && pieces.columns < kLong) take(std::integral_constant<int, 2>());
    while (first < last) take(std::integral_constant<int, 1>());
}

template <Format kFormat, int M>
__attribute__((noinline)) void tiles_apart(const Matrix& w, int64_t panel, int64_t panels,
                                           const float* const* rows, Pieces pieces, int64_t first,
                                           int64_t last, simd::Floats* out) {
    const float* x[M];
    for (int m = 0; m < M; ++m) x[m] = rows[m];
    const int64_t bytes = panel_bytes(kFormat, w.columns);
    for (int64_t i = 0; i < panels; ++i)
        tile_of_pieces<kFormat, M>(w.data + (panel + i) * bytes, x, pieces, first, last, out + i * M);
}

template <int M>
void tiles_of_few(const Matrix& w, int64_t panel, int64_t panels, const float* const* rows, Pieces pieces,
                  int64_t first, int64_t last, simd::Floats* out) {
    switch (static_cast<Format>(w.format)) {
        case Format::kHalf: return tiles_apart<Format::kHalf, M>(w, panel, panels, rows, pieces, first, last, out);
        case Format::kBrain: return tiles_apart<Format::kBrain, M>(w, panel, panels, rows, pieces, first, last, out);
        default: return tiles_apart<Format::kFloat, M>(w, panel, panels, rows, pieces, first, last, out);
    }
}

void tile_apart(int count, const Matrix& w, int64_t panel, int64_t panels, const float* const* rows,
                Pieces pieces, int64_t first, int64_t last, simd::Floats* out) {
    switch (count) {
        case 1: return tiles_of_few<1>(w, panel, panels, rows, pieces, first, last, out);
        case 2: return tiles_of_few<2>(w, panel, panels, rows, pieces, first, last, out);
        case 4: return tiles_of_few<4>(w, panel, panels, rows, pieces, first, last, out);
    }
    if constexpr (kFewApart > 4) return tiles_of_few<8>(w, panel, panels, rows, pieces, first, last, out);
}

template <int M>
void tile_of_rows(const Matrix& w, int64_t panel, const Inputs& in, int64_t row, simd::Floats* out) {
    const Format format = static_cast<Format>(w.format);
    const uint8_t* data = w.data + panel * panel_bytes(format, w.columns);
    const float* row_scales = w.row_scales ? w.row_scales + panel * kPanel : nullptr;
    switch (format) {
        case Format::kFloat: return tile_of_floats<Format::kFloat, M>(data, in, row, out);
        case Format::kHalf: return tile_of_floats<Format::kHalf, M>(data, in, row, out);
        case Format::kBrain: return tile_of_floats<Format::kBrain, M>(data, in, row, out);
        case Format::kInt8: return tile_of_codes<Int8, M>(data, row_scales, in, row, out);
        case Format::kQ8: return tile_of_codes<Q8, M>(data, row_scales, in, row, out);
        case Format::kQ4: return tile_of_codes<Q4, M>(data, row_scales, in, row, out);
        case Format::kQ4Min: return tile_of_codes<Q4Min, M>(data, row_scales, in, row, out);
        case Format::kQ5: return tile_of_codes<Q5, M>(data, row_scales, in, row, out);
        case Format::kQ4K: return tile_of_super_blocks<Q4K, M>(data, in, row, out);
        case Format::kQ5K: return tile_of_super_blocks<Q5K, M>(data, in, row, out);
        case Format::kQ6K: return tile_of_super_blocks<Q6K, M>(data, in, row, out);
    }
}

void tile(int count, const Matrix& w, int64_t panel, const Inputs& in, int64_t row, simd::Floats* out) {
    switch (count) {
        case 1: return tile_of_rows<1>(w, panel, in, row, out);
        case 2: return tile_of_rows<2>(w, panel, in, row, out);
        case 4: return tile_of_rows<4>(w, panel, in, row, out);
        case kTogether: return tile_of_rows<kTogether>(w, panel, in, row, out);
    }
    if constexpr (kTogether > 8) return tile_of_rows<8>(w, panel, in, row, out);
}

template <int M>
void tile_of_both(const Matrix& w, int64_t panel, const Matrix& other, int64_t other_panel, const Inputs& in,
                      int64_t row, simd::Floats* out, simd::Floats* others) {
    const Format format = static_cast<Format>(w.format);
    const int64_t bytes = panel_bytes(format, w.columns);
    const uint8_t *first = w.data + panel * bytes, *second = other.data + other_panel * bytes;
    switch (format) {
        case Format::kFloat: return tile_of_two_panels<Format::kFloat, M>(first, second, in, row, out, others);
        case Format::kHalf: return tile_of_two_panels<Format::kHalf, M>(first, second, in, row, out, others);
        default: return tile_of_two_panels<Format::kBrain, M>(first, second, in, row, out, others);
    }
}

void tile_of_two(int count, const Matrix& w, int64_t panel, const Matrix& other, int64_t other_panel,
                 const Inputs& in, int64_t row, simd::Floats* out, simd::Floats* others) {
    if constexpr (reads_two_panels(8)) {
        if (count == kTogether)
            tile_of_both<kTogether>(w, panel, other, other_panel, in, row, out, others);
        else
            tile_of_both<8>(w, panel, other, other_panel, in, row, out, others);
    }
}

// The values of rows [first, last) of a panel of floats, row after row.
template <Format kFormat>
inline void read_lanes(const uint8_t* panel, int64_t first, int64_t last, int64_t columns, float* out) {
    // A square of values is turned at a time, so that neither side is read or written in leaps.
    float square[kPanel][kPanel];
    for (int64_t k = 0; k < columns; k += kPanel) {
        const int64_t count = std::min(kPanel, columns - k);
        for (int64_t i = 0; i < count; ++i) simd::store(square[i], read_column<kFormat>(panel, k + i));
        for (int64_t lane = first; lane < last; ++lane)
            for (int64_t i = 0; i < count; ++i) out[(lane - first) * columns + k + i] = square[i][lane];
    }
}

// The codes of one lane of a block, column after column, four at a time; see pack.h.
template <int kBits>
inline void read_codes(const uint8_t* block, int64_t lane, uint8_t (&out)[kBlock]) {
    const auto four_at = [&](int64_t byte) {
        uint32_t four;
        std::memcpy(&four, block + 4 * lane + byte, 4);
        return four;
    };
    for (int64_t g = 0; g < 8; ++g) {
        uint32_t four = four_at(64 * (kBits == 8 ? g : g % 4));
        if (kBits < 8) four = (g < 4 ? four : four >> 4) & 0x0f0f0f0f;
        if (kBits == 5) four |= (four_at(256) >> g & 0x01010101) << 4;
        if (kBits == 6) four |= (four_at(256 + 64 * (g / 4)) >> 2 * (g % 4) & 0x03030303) << 4;
        std::memcpy(out + 4 * g, &four, 4);
    }
}

// The values of rows [first, last) of a panel of codes, with a scale per block or per row. The last
// block may have fewer columns.
template <class Kind>
inline void read_lanes(const uint8_t* panel, int64_t first, int64_t last, int64_t columns,
                       const float* row_scales, float* out) {
    constexpr int64_t kCodes = block_bytes(Kind::kBits);
    // What was added to codes of 8 bits in memory, whether the kernels read them with it or not.
    constexpr int kAdded = Kind::kBits == 8 ? 128 : Kind::kOffset;
    const int64_t blocks = blocks_of(columns);
    const uint16_t* halves = reinterpret_cast<const uint16_t*>(panel + blocks * kCodes);
    float scales[kPanel], mins[kPanel] = {};
    if (Kind::kRowScales) std::copy_n(row_scales, kPanel, scales);
    for (int64_t block = 0; block < blocks; ++block) {
        if (!Kind::kRowScales) simd::store(scales, simd::load_halves(halves + block * kPanel));
        if (Kind::kMins) simd::store(mins, simd::load_halves(halves + (blocks + block) * kPanel));
        const int64_t count = std::min(kBlock, columns - block * kBlock);
        for (int64_t lane = first; lane < last; ++lane) {
            uint8_t codes[kBlock];
            read_codes<Kind::kBits>(panel + block * kCodes, lane, codes);
            const float scale = scales[lane], least = mins[lane];
            float values[kBlock];
            for (int64_t k = 0; k < kBlock; ++k) values[k] = float(int(codes[k]) - kAdded) * scale + least;
            std::copy_n(values, count, out + (lane - first) * columns + block * kBlock);
        }
    }
}

// The values of rows [first, last) of a panel with super-blocks.
template <class Kind>
inline void read_super_lanes(const uint8_t* panel, int64_t first, int64_t last, int64_t columns, float* out) {
    constexpr int64_t kCodes = block_bytes(Kind::kBits), kParts = Kind::kMins ? 1 : 2;
    constexpr int kAdded = Kind::kMins ? 0 : 32;
    const int64_t blocks = columns / kBlock;
    const int8_t* parts = reinterpret_cast<const int8_t*>(panel + blocks * kCodes);
    const uint16_t* scales = reinterpret_cast<const uint16_t*>(parts + 2 * blocks * kPanel);
    float by[kPanel], below[kPanel] = {};
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t super = block / kSuperBlock;
        simd::store(by, simd::load_halves(scales + super * kPanel));
        if (Kind::kMins) {
            simd::store(below, simd::load_halves(scales + (blocks / kSuperBlock + super) * kPanel));
            for (int64_t i = 0; i < kPanel; ++i) below[i] *= float(parts[(blocks + block) * kPanel + i]);
        }
        for (int64_t lane = first; lane < last; ++lane) {
            uint8_t codes[kBlock];
            read_codes<Kind::kBits>(panel + block * kCodes, lane, codes);
            float* to = out + (lane - first) * columns + block * kBlock;
            for (int64_t part = 0; part < kParts; ++part) {
                const float scale = by[lane] * float(parts[(block * kParts + part) * kPanel + lane]);
                for (int64_t k = part * kBlock / kParts; k < (part + 1) * kBlock / kParts; ++k)
                    to[k] = scale * float(int(codes[k]) - kAdded) - below[lane];
            }
        }
    }
}

void read_row(const Matrix& w, int64_t row, float* out) { read_rows(w, row, row + 1, out); }

// The values of lanes [first, last) of a panel, which lies at `panel`; `number`: which one it is.
inline void read_panel(const Matrix& w, const uint8_t* panel, int64_t number, int64_t first, int64_t last,
                       float* out) {
    const int64_t columns = w.columns;
    const float* scales = w.row_scales ? w.row_scales + number * kPanel : nullptr;
    switch (static_cast<Format>(w.format)) {
        case Format::kFloat: return read_lanes<Format::kFloat>(panel, first, last, columns, out);
        case Format::kHalf: return read_lanes<Format::kHalf>(panel, first, last, columns, out);
        case Format::kBrain: return read_lanes<Format::kBrain>(panel, first, last, columns, out);
        case Format::kInt8: return read_lanes<Int8>(panel, first, last, columns, scales, out);
        case Format::kQ8: return read_lanes<Q8>(panel, first, last, columns, scales, out);
        case Format::kQ4: return read_lanes<Q4>(panel, first, last, columns, scales, out);
        case Format::kQ4Min: return read_lanes<Q4Min>(panel, first, last, columns, scales, out);
        case Format::kQ5: return read_lanes<Q5>(panel, first, last, columns, scales, out);
        case Format::kQ4K: return read_super_lanes<Q4K>(panel, first, last, columns, out);
        case Format::kQ5K: return read_super_lanes<Q5K>(panel, first, last, columns, out);
        case Format::kQ6K: return read_super_lanes<Q6K>(panel, first, last, columns, out);
    }
}

void read_rows(const Matrix& w, int64_t first, int64_t last, float* out) {
    const int64_t bytes = panel_bytes(static_cast<Format>(w.format), w.columns);
    for (int64_t row = first, end; row < last; out += (end - row) * w.columns, row = end) {
        const int64_t number = row / kPanel, begin = number * kPanel;
        end = std::min(last, begin + kPanel);
        read_panel(w, w.data + number * bytes, number, row - begin, end - begin, out);
    }
}

}  // namespace everystep
