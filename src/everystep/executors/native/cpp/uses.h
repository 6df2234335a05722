// What the rows of a part ask of adapters, in the order in which it is computed.
//
// A row may use several adapters, one after another. Uses with the same place in their rows' orders
// and the same adapter are computed together, so that an adapter is read once for all of them; what a
// use gives depends on its row and its adapter alone.
#pragma once

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

    // How many panels the largest `down` of a layer has.
    int64_t panels(int64_t index, ReadOf read) const;
    // Whether any changes this map of a layer.
    bool change(int64_t index, ChangedMap map) const;

  private:
    std::vector<Use> uses_;
    std::vector<UseTile> tiles_;
    std::vector<int64_t> slot_of_;
    int64_t slots_ = 0, most_ = 0;
};

// What uses do to outputs of a linear map, of which up to two panels are prepared at a time. `reduced`:
// what is made of what the map reads, for each use; `room`: for `kRoom` floats of each row that uses any.
class PanelChanges {
  public:
    static constexpr int64_t kPlaces = 2, kRoom = kPlaces * 2 * kPanel;

    PanelChanges() = default;
    PanelChanges(const Uses& uses, int64_t index, ChangedMap map, const Inputs& in, const float* reduced,
                 float* room);

    bool any() const { return uses_ != nullptr; }

    // What becomes of a panel of the map is known at this place.
    void prepare(int64_t place, int64_t panel);

    // Sixteen outputs of a row as they are after its changes; those of other rows stay as they are.
    simd::Floats changed(int64_t place, int64_t row, simd::Floats x) const {
        const int64_t slot = uses_ ? uses_->slot_of(row) : -1;
        if (slot < 0) return x;
        const float* factor = room_ + (place * 2 * uses_->slots() + slot) * kPanel;
        return simd::fma(x, simd::load(factor), simd::load(factor + uses_->slots() * kPanel));
    }

  private:
    void change_tile(const UseTile& tile, const Change& change, int64_t panel, float* factors,
                     float* sums) const;

    const Uses* uses_ = nullptr;
    int64_t index_ = 0;
    ChangedMap map_ = kUnchanged;
    const Inputs* in_ = nullptr;
    const float* reduced_ = nullptr;
    float* room_ = nullptr;
};

}  // namespace everystep
