// Linear maps panel by panel, or by two: 16 outputs of every row for each, bias included.
#pragma once

#include "linear.h"
#include "rows.h"

namespace everystep {

inline int64_t panels_in(const Linear& linear) {
    int64_t panels = 0;
    for (int64_t i = 0; i < linear.count; ++i) panels += panels_of(linear.parts[i].rows);
    return panels;
}

inline int64_t outputs_of(const Linear& linear) {
    int64_t outputs = 0;
    for (int64_t i = 0; i < linear.count; ++i) outputs += linear.parts[i].rows;
    return outputs;
}

// A panel of a linear map: `count` outputs from `column` on.
struct Panel {
    const Matrix& matrix;
    int64_t number, column;
    int count;
    bool biased;
    simd::Floats bias;

    // The outputs of M rows from `row` on.
    template <int M>
    void products(const Inputs& in, int64_t row, simd::Floats (&out)[M]) const {
        tile(M, matrix, number, in, row, out);
        add_bias(out);
    }

    template <int M>
    void add_bias(simd::Floats (&out)[M]) const {
        if (!biased) return;
        for (simd::Floats& x : out) x = simd::add(x, bias);
    }
};

// The outputs of M rows of two panels with the same inputs.
template <int M>
inline void products_of_two(const Panel& panel, const Panel& other, const Inputs& in, int64_t row,
                            simd::Floats (&out)[M], simd::Floats (&others)[M]) {
    if constexpr (reads_two_panels(M)) {
        const int32_t format = panel.matrix.format;
        if (format == other.matrix.format && float_bytes(static_cast<Format>(format))) {
            tile_of_two(M, panel.matrix, panel.number, other.matrix, other.number, in, row, out, others);
            panel.add_bias(out);
            other.add_bias(others);
            return;
        }
    }
    panel.products(in, row, out);
    other.products(in, row, others);
}

inline Panel panel_of(const Linear& linear, int64_t number) {
    int64_t column = number * kPanel;
    const Matrix* w = linear.parts;
    for (; number >= panels_of(w->rows); ++w) {
        column += w->rows - panels_of(w->rows) * kPanel;
        number -= panels_of(w->rows);
    }
    const int count = int(std::min(kPanel, w->rows - number * kPanel));
    const bool biased = linear.bias != nullptr;
    return {*w, number, column, count, biased,
            biased ? read(linear.bias + column, count) : simd::splat(0.0f)};
}

// Calls `use(row, column, values, count)` with 16 outputs of every row, bias included.
template <class Use>
inline void multiply_panel(const Linear& linear, int64_t number, const Inputs& in, int64_t rows,
                           Use use) {
    const Panel panel = panel_of(linear, number);
    each_tile(rows, [&](auto count, int64_t row) {
        simd::Floats out[count];
        panel.products(in, row, out);
        for (int m = 0; m < count; ++m) use(row + m, panel.column, out[m], panel.count);
    });
}

// The panels of a linear map, shared out to members of a crew. An item is one, or two where these are
// computed together and every member still has several items.
class PanelItems {
  public:
    PanelItems(const Linear& linear, int64_t rows, int members)
        : linear_(linear), rows_(rows), panels_(panels_in(linear)) {
        if (reads_two_panels(rows) && reads_values(linear) && panels_ >= 8 * members) each_ = 2;
    }

    int64_t count() const { return (panels_ + each_ - 1) / each_; }

    // Calls `use(row, column, values, count)` with what the panels of an item give to every row.
    template <class Use>
    void multiply(int64_t item, const Inputs& in, Use use) const {
        const int64_t number = item * each_;
        if (each_ == 1 || number + 1 == panels_) return multiply_panel(linear_, number, in, rows_, use);
        const Panel panel = panel_of(linear_, number), other = panel_of(linear_, number + 1);
        each_tile(rows_, [&](auto count, int64_t row) {
            simd::Floats out[count], others[count];
            products_of_two(panel, other, in, row, out, others);
            for (int m = 0; m < count; ++m) {
                use(row + m, panel.column, out[m], panel.count);
                use(row + m, other.column, others[m], other.count);
            }
        });
    }

    // The same, with outputs as they are after changes.
    template <class Changes, class Use>
    void multiply(int64_t item, const Inputs& in, Changes& changes, Use use) const {
        if (!changes.any()) return multiply(item, in, use);
        const int64_t number = item * each_, first = panel_of(linear_, number).column;
        changes.prepare(number, std::min(each_, panels_ - number));
        multiply(item, in, [&](int64_t row, int64_t column, simd::Floats x, int count) {
            use(row, column, changes.changed(column == first ? number : number + 1, row, x), count);
        });
    }

    // Writes it to where it belongs among the row's outputs, which begin at `place(row)`.
    template <class Place>
    void write(int64_t item, const Inputs& in, Place place) const {
        multiply(item, in, writer(place));
    }

    template <class Changes, class Place>
    void write(int64_t item, const Inputs& in, Changes& changes, Place place) const {
        multiply(item, in, changes, writer(place));
    }

  private:
    template <class Place>
    static auto writer(Place place) {
        return [place](int64_t row, int64_t column, simd::Floats x, int count) {
            everystep::write(place(row) + column, x, count);
        };
    }

    const Linear& linear_;
    const int64_t rows_, panels_;
    int64_t each_ = 1;
};

// Whether panel i has the columns from 16 i on, as phases need that join what panels give: all
// matrices but the last are whole panels.
inline bool in_columns_of_panels(const Linear& linear, int64_t columns) {
    int64_t before = 0;
    for (int64_t i = 0; i < linear.count; ++i) {
        if (before % kPanel != 0) return false;
        before += linear.parts[i].rows;
    }
    return before == columns;
}

}  // namespace everystep
