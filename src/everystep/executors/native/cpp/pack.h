// How a matrix lies in memory, for every instruction set alike.
//
// A panel is 16 rows (output features), one per lane. Quantised panels hold their codes first, block
// after block of 32 columns, then 16 half-precision scales per block, then as many minimums:
//
//     8 bits:  byte 64 g + 4 r + j of a block is column 4 g + j of row r, plus 128 (g < 8)
//     4 bits:  byte 64 g + 4 r + j holds column 4 g + j in its low half and that column + 16 in its
//              high half (g < 4)
//
// so that one load brings four columns of all lanes, as a dot product of bytes wants them. Floats of
// 32 or 16 bits lie column after column, 16 rows each. Rows and columns beyond the last are zeros.
#pragma once

#include <cstdint>
#include <cstring>

#include "model.h"

namespace everystep {

constexpr int64_t kPanel = 16;
constexpr int64_t kBlock = 32;

inline int64_t panels_of(int64_t rows) { return (rows + kPanel - 1) / kPanel; }
inline int64_t blocks_of(int64_t columns) { return (columns + kBlock - 1) / kBlock; }

inline int64_t code_bytes(Format format) {
    return format == Format::kQ4 || format == Format::kQ4Min ? 256 : 512;
}
inline int64_t scale_bytes(Format format) {
    return format == Format::kInt8 ? 0 : format == Format::kQ4Min ? 64 : 32;
}
// Of a value of a format of floats, and 0 of a format of codes.
constexpr int64_t float_bytes(Format format) {
    if (format == Format::kFloat) return 4;
    return format == Format::kHalf || format == Format::kBrain ? 2 : 0;
}
inline int64_t panel_bytes(Format format, int64_t columns) {
    const int64_t value = float_bytes(format);
    const int64_t block = code_bytes(format) + scale_bytes(format);
    const int64_t bytes = value ? columns * kPanel * value : blocks_of(columns) * block;
    return (bytes + 63) / 64 * 64;
}

}  // namespace everystep
