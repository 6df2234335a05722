// How a matrix lies in memory, for every instruction set alike.
//
// A panel is 16 rows (output features), one per lane. Quantised panels hold their codes first, block
// after block of 32 columns, then 16 half-precision scales per block, then as many minimums:
//
//     8 bits:  byte 64 g + 4 r + j of a block is column 4 g + j of row r, plus 128 (g < 8)
//     4 bits:  byte 64 g + 4 r + j holds column 4 g + j in its low half and that column + 16 in its
//              high half (g < 4)
//
// so that one load brings four columns of all lanes, as a dot product of bytes wants them.
//
// Panels of 5 and 6 bits have codes of 4 bits first in each block, then what is above them:
//
//     5 bits:  bit g of byte 4 r + j is the fifth of column 4 g + j (g < 8)
//     6 bits:  bits 2 g and 2 g + 1 of byte 64 p + 4 r + j are those of column 16 p + 4 g + j (g < 4)
//
// Where there are super-blocks (256 columns), what follows the codes are scales of 8 bits, 16 per part
// (32 columns; 16 of 6 bits), for all but 6 bits as many minimums, then 16 half-precision scales per
// super-block, and as many for the minimums. Floats of
// 32 or 16 bits lie column after column, 16 rows each. Rows and columns beyond the last are zeros.
#pragma once

#include <cstdint>
#include <cstring>

#include "model.h"

namespace everystep {

constexpr int64_t kPanel = 16;
constexpr int64_t kBlock = 32;
constexpr int64_t kSuperBlock = 8;  // blocks

inline int64_t panels_of(int64_t rows) { return (rows + kPanel - 1) / kPanel; }
inline int64_t blocks_of(int64_t columns) { return (columns + kBlock - 1) / kBlock; }

// Of a block in a panel of codes of so many bits.
constexpr int64_t block_bytes(int bits) { return bits == 8 ? 512 : 64 * bits; }
inline int64_t code_bytes(Format format) {
    switch (format) {
        case Format::kQ4:
        case Format::kQ4Min:
        case Format::kQ4K: return 256;
        case Format::kQ5:
        case Format::kQ5K: return 320;
        case Format::kQ6K: return 384;
        default: return 512;
    }
}
inline int64_t scale_bytes(Format format) {
    switch (format) {
        case Format::kInt8: return 0;
        case Format::kQ4Min: return 64;
        case Format::kQ4K:
        case Format::kQ5K: return 40;
        case Format::kQ6K: return 36;
        default: return 32;
    }
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
