// Puts codes and scales, row by row as QuantizedWeight has them, into panels.
#include "pack.h"

namespace everystep {
namespace {

void pack_codes8(const int8_t* codes, int64_t columns, int64_t row, int64_t lane, uint8_t* panel) {
    for (int64_t k = 0; k < columns; ++k) {
        const int64_t block = k / 32, within = k % 32;
        panel[block * 512 + within / 4 * 64 + lane * 4 + within % 4] =
            static_cast<uint8_t>(codes[row * columns + k] + 128);
    }
}

void pack_codes4(const uint8_t* codes, int64_t columns, int64_t row, int64_t lane, uint8_t* panel) {
    const int64_t bytes = columns / 2;
    for (int64_t i = 0; i < bytes; ++i) {
        const int64_t block = i / 16, within = i % 16;
        panel[block * 256 + within / 4 * 64 + lane * 4 + within % 4] = codes[row * bytes + i];
    }
}

void pack_halves(const uint16_t* values, int64_t blocks, int64_t row, int64_t lane, uint8_t* to) {
    for (int64_t block = 0; block < blocks; ++block)
        std::memcpy(to + (block * kPanel + lane) * 2, values + row * blocks + block, 2);
}

void pack_floats(const float* values, int64_t columns, int64_t row, int64_t lane, uint8_t* panel) {
    float* to = reinterpret_cast<float*>(panel);
    for (int64_t k = 0; k < columns; ++k) to[k * kPanel + lane] = values[row * columns + k];
}

void pack_row(Format format, int64_t columns, const void* codes, const void* scales,
              const void* mins, int64_t row, int64_t lane, uint8_t* panel) {
    const int64_t blocks = blocks_of(columns), after_codes = blocks * code_bytes(format);
    if (format == Format::kFloat) {
        pack_floats(static_cast<const float*>(codes), columns, row, lane, panel);
        return;
    }
    if (code_bytes(format) == 512)
        pack_codes8(static_cast<const int8_t*>(codes), columns, row, lane, panel);
    else
        pack_codes4(static_cast<const uint8_t*>(codes), columns, row, lane, panel);
    if (format != Format::kInt8)
        pack_halves(static_cast<const uint16_t*>(scales), blocks, row, lane, panel + after_codes);
    if (format == Format::kQ4Min)
        pack_halves(static_cast<const uint16_t*>(mins), blocks, row, lane,
                    panel + after_codes + blocks * 32);
}

}  // namespace
}  // namespace everystep

using namespace everystep;

extern "C" int64_t es_packed_bytes(int32_t format, int64_t rows, int64_t columns) {
    return panels_of(rows) * panel_bytes(static_cast<Format>(format), columns);
}

// Panels from the given ones on; rows of codes, scales and minimums start with this matrix's first.
extern "C" void es_pack(int32_t format_number, int64_t rows, int64_t columns, const void* codes,
                        const void* scales, const void* mins, uint8_t* out) {
    const Format format = static_cast<Format>(format_number);
    const int64_t bytes = panel_bytes(format, columns);
    // A code of zero is stored as 128 where codes are signed, so columns that do not exist are too.
    const int empty = format == Format::kInt8 || format == Format::kQ8 ? 128 : 0;
    for (int64_t panel = 0; panel < panels_of(rows); ++panel) {
        uint8_t* to = out + panel * bytes;
        std::memset(to, 0, bytes);
        if (empty) std::memset(to, empty, blocks_of(columns) * 512);
        for (int64_t lane = 0; lane < kPanel && panel * kPanel + lane < rows; ++lane)
            pack_row(format, columns, codes, scales, mins, panel * kPanel + lane, lane, to);
    }
}
