// What the rows of a part ask of adapters, in the order in which it is computed.
//
// A row may use several adapters, one after another. Uses with the same place in their rows' orders
// and the same adapter are computed together, so that an adapter is read once for all of them; what a
// use gives depends on its row and its adapter alone.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "linear.h"
#include "model.h"

namespace everystep {

// A use of an adapter by a row of a part. `slot`: the row's number among those that use any.
struct Use {
    int64_t row, slot;
    int64_t turn;  // its place in the row's order
    const Adapter* adapter;
    float weight;
};

// Uses of one adapter that are computed together.
struct UseTile {
    const Adapter* adapter;
    int64_t first, count;
};

class Uses {
  public:
    Uses() = default;
    // Those of tokens [begin, end) of a work.
    Uses(const Work& work, int64_t begin, int64_t end);

    bool empty() const { return uses_.empty(); }
    int64_t count() const { return int64_t(uses_.size()); }
    int64_t slots() const { return slots_; }
    const Use& operator[](int64_t i) const { return uses_[i]; }
    const std::vector<UseTile>& tiles() const { return tiles_; }
    // Where a row that uses any has its place, -1 for others.
    int64_t slot_of(int64_t row) const { return slot_of_[row]; }
    // Rows of what is made of one use at most, in whole panels.
    int64_t most() const { return most_; }
    // Those that `down` makes.
    int64_t most_down() const { return most_down_; }

    // How many panels the largest `down` of a layer has.
    int64_t panels(int64_t index, ReadOf read) const;
    // How many folds the adapters of a layer have at most, and how many rows may be turned.
    int64_t folds(int64_t index, ReadOf read) const;
    int64_t most_turned() const;
    // Whether any changes this map of a layer.
    bool change(int64_t index, ChangedMap map) const;

  private:
    std::vector<Use> uses_;
    std::vector<UseTile> tiles_;
    std::vector<int64_t> slot_of_;
    int64_t slots_ = 0, most_ = 0, most_down_ = 0;
};

// A row as one turn of one use makes it. `from`: the turned row that it is made of, that of the next
// use around it, or -1 for what the map reads.
struct TurnedRow {
    int64_t use;
    const Turn* turn;
    int64_t from;
};

// The rows that turns of a part make of what a map reads; those of one row lie side by side, the
// outermost first.
class TurnedRows {
  public:
    TurnedRows() = default;
    TurnedRows(const Uses& uses, int64_t index, ReadOf read);

    bool empty() const { return rows_.empty(); }
    int64_t count() const { return int64_t(rows_.size()); }
    const TurnedRow& operator[](int64_t i) const { return rows_[i]; }
    // Which of them a change of these rows reads that stands inside of all uses after `turn`; -1: what
    // the map reads. A turn of -1: the map itself.
    int64_t inside(int64_t slot, int64_t turn, int64_t stretch) const;

  private:
    const Uses* uses_ = nullptr;
    std::vector<TurnedRow> rows_;
    std::vector<int64_t> begins_;  // (slots + 1,)
};

// What uses do to outputs of a linear map, for one member of a crew. `reduced`: what is made of what the
// map reads, for each use; `room`: for `room_for` so many rows that use any.
class PanelChanges {
  public:
    PanelChanges() = default;
    PanelChanges(const Uses& uses, int64_t index, ChangedMap map, const Linear& linear, const Inputs& in,
                 const Inputs& turned, const float* reduced, float* room);

    static int64_t room_for(int64_t slots) { return at_once(slots) * 2 * slots * kPanel; }

    bool any() const { return uses_ != nullptr; }

    // What becomes of these panels of the map is known, until others are prepared.
    void prepare(int64_t panel, int64_t count) {
        if (uses_ && (panel < begin_ || panel + count > end_)) compute(panel);
    }

    // Sixteen outputs of a row as they are after its changes; those of other rows stay as they are. A
    // factor of 1 changes no bit, so it does not matter who else has one.
    simd::Floats changed(int64_t panel, int64_t row, simd::Floats x) const {
        const int64_t slot = uses_ ? uses_->slot_of(row) : -1;
        if (slot < 0) return x;
        if (!turned_rows_.empty()) x = turned(panel, slot, x);
        const float* sum = sums_of(panel) + slot * kPanel;
        if (!scales_) return simd::add(x, simd::load(sum));
        return simd::fma(x, simd::load(sum + uses_->slots() * kPanel), simd::load(sum));
    }

  private:
    static constexpr int64_t kMostAtOnce = 16;

    // Members go through neighbouring panels, so several are prepared at a time, two at least.
    static int64_t at_once(int64_t slots) {
        return std::clamp<int64_t>(256 / std::max<int64_t>(slots, 1), 2, kMostAtOnce);
    }

    void compute(int64_t panel);
    void change_tile(const UseTile& tile, const Change& change) const;
    // The outputs of a panel where rows of it read what turns have made.
    simd::Floats turned(int64_t panel, int64_t slot, simd::Floats x) const;
    // (slots, 16) sums, then as many factors.
    float* sums_of(int64_t panel) const { return room_ + (panel - begin_) * 2 * uses_->slots() * kPanel; }

    const Uses* uses_ = nullptr;
    int64_t index_ = 0;
    ChangedMap map_ = kUnchanged;
    const Linear* linear_ = nullptr;
    const Inputs* in_ = nullptr;
    const Inputs* turned_ = nullptr;
    TurnedRows turned_rows_;
    std::vector<const Adapter*> adapters_;  // each once
    const float* reduced_ = nullptr;
    float* room_ = nullptr;
    bool scales_ = false;  // whether any change of the map has gains
    int64_t begin_ = 0, end_ = 0;
};

}  // namespace everystep
