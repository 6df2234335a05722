// Matrix products with rows of activations, one panel of 16 outputs at a time, or two.
//
// The value of an output depends on its row and its weights alone: columns are added in one order,
// whatever the number of rows that are computed together. Integers are exact within a block of 32;
// blocks are added in float, from the first to the last.
#pragma once

#include <algorithm>
#include <type_traits>

#include "pack.h"
#include "simd.h"

namespace everystep {

// How many rows are computed together at most. Each has a sum and a product.
constexpr int64_t kTogether = std::min(12, simd::kSums);

inline int64_t whole_groups(int64_t rows) { return (rows + kTogether - 1) / kTogether * kTogether; }

// Rows of inputs as floats and, for products with codes, as codes in blocks of 32 with a scale each.
// A group of rows that are computed together lies block after block, so that a kernel finds all of
// its rows at fixed distances.
struct Inputs {
    float* values;  // (rows, columns)
    int64_t columns, blocks;
    int64_t together;  // rows of a group: kTogether, or all rows where they are fewer
    int8_t* codes;     // (groups, blocks, rows of a group, 32), zeros beyond the columns
    float* scales;     // (groups, blocks, rows of a group)
    int32_t* offsets;  // (groups, blocks, rows of a group), the sum of a block's codes times -128
    float* sums;       // (groups, blocks, rows of a group), the sum of a block's codes times its scale
    int32_t* firsts;   // (groups, blocks, rows of a group), the sum of the first 16 codes times -32

    int64_t at(int64_t row, int64_t block) const {
        return (row / together * blocks + block) * together + row % together;
    }
};

// Makes the codes of a block of 32 values, given in two halves.
inline void quantise_block(const Inputs& in, int64_t row, int64_t block, simd::Floats low,
                           simd::Floats high) {
    using namespace simd;
    static_assert(kBlock == 2 * kLanes);
    const int64_t at = in.at(row, block);
    const float scale = largest(max(abs(low), abs(high))) / 127.0f;
    const Floats by = splat(scale == 0 ? 1.0f : scale);
    const Ints left = round(div(low, by)), right = round(div(high, by));
    store_bytes(in.codes + at * kBlock, left);
    store_bytes(in.codes + at * kBlock + kLanes, right);
    const int32_t total = sum(add(left, right));
    in.scales[at] = scale;
    in.offsets[at] = -128 * total;
    in.firsts[at] = -32 * sum(left);
    in.sums[at] = scale * float(total);
}

// Makes them of the values that lie there.
inline void quantise_block(const Inputs& in, int64_t row, int64_t block) {
    const float* x = in.values + row * in.columns;
    const auto half = [&](int64_t first) {
        const int64_t count = std::clamp<int64_t>(in.columns - first, 0, simd::kLanes);
        return count == simd::kLanes ? simd::load(x + first) : simd::load_first(x + first, int(count));
    };
    quantise_block(in, row, block, half(block * kBlock), half(block * kBlock + simd::kLanes));
}

inline void quantise_row(const Inputs& in, int64_t row) {
    for (int64_t block = 0; block < in.blocks; ++block) quantise_block(in, row, block);
}

inline bool reads_codes(const Linear& linear) {
    return std::any_of(linear.parts, linear.parts + linear.count, [](const Matrix& part) {
        return !float_bytes(static_cast<Format>(part.format));
    });
}
inline bool reads_values(const Linear& linear) {
    return std::any_of(linear.parts, linear.parts + linear.count, [](const Matrix& part) {
        return float_bytes(static_cast<Format>(part.format)) > 0;
    });
}

// Whether so many rows are computed with two panels at once: the registers hold the sums of both, and
// rows are so many that loading inputs, and not reading weights, takes the time.
constexpr bool reads_two_panels(int64_t rows) { return simd::kSums >= 2 * kTogether && rows >= 8; }

// Sixteen outputs of `count` rows from `row` on, to `out`: a number of rows that `each_tile` gives.
void tile(int count, const Matrix& w, int64_t panel, const Inputs& in, int64_t row, simd::Floats* out);

// Sixteen outputs each of two matrices of one format of floats, of 8 rows or of kTogether. Each input is
// loaded once for both; with one panel these loads take longer than the sums.
void tile_of_two(int count, const Matrix& w, int64_t panel, const Matrix& other, int64_t other_panel,
                 const Inputs& in, int64_t row, simd::Floats* out, simd::Floats* others);

// Columns in pieces, each of which has a sum of its own; sums are added from the first to the last.
struct Pieces {
    int64_t columns, count;

    int64_t begin(int64_t piece) const { return columns * piece / count; }
};

// (panels, count) times sixteen outputs of rows of floats, which lie wherever they do, over the pieces
// [first, last) of the columns of a matrix of floats. `count`: a number that `each_few` gives.
void tile_apart(int count, const Matrix& w, int64_t panel, int64_t panels, const float* const* rows,
                Pieces pieces, int64_t first, int64_t last, simd::Floats* out);

// The values of rows [first, last) of a packed matrix, row after row; of one, as an embedding table is
// read.
void read_rows(const Matrix& w, int64_t first, int64_t last, float* out);
void read_row(const Matrix& w, int64_t row, float* out);

constexpr int64_t kFewApart = std::min(8, simd::kSums > 8 ? 8 : 4);

// Calls `use(count, row)` for tiles of rows that lie apart; `count` is a constant.
template <class Use>
inline void each_few(int64_t rows, Use use) {
    int64_t row = 0;
    const auto tiles_of = [&](auto count) {
        for (; rows - row >= count; row += count) use(count, row);
    };
    tiles_of(std::integral_constant<int, kFewApart>());
    if constexpr (kFewApart > 4) tiles_of(std::integral_constant<int, 4>());
    tiles_of(std::integral_constant<int, 2>());
    tiles_of(std::integral_constant<int, 1>());
}

// Calls `use(count, row)` for the tiles that make up rows [0, rows); `count` is a constant.
template <class Use>
inline void each_tile(int64_t rows, Use use) {
    int64_t row = 0;
    const auto tiles_of = [&](auto count) {
        for (; rows - row >= count; row += count) use(count, row);
    };
    tiles_of(std::integral_constant<int, kTogether>());
    if constexpr (kTogether > 8) tiles_of(std::integral_constant<int, 8>());
    tiles_of(std::integral_constant<int, 4>());
    tiles_of(std::integral_constant<int, 2>());
    tiles_of(std::integral_constant<int, 1>());
}

}  // namespace everystep
