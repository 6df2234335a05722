// What adapters do in a step: what is read becomes a few values for each use, and these change the
// outputs of linear maps, panel by panel, before anybody reads them.
#include <algorithm>
#include <array>
#include <vector>

#include "rows.h"
#include "step.h"

namespace everystep {

Uses::Uses(const Work& work, int64_t begin, int64_t end) {
    if (!work.use_begins) return;
    slot_of_.assign(end - begin, -1);
    int64_t offset = 0;
    for (int64_t feed = 0; feed < work.feeds; offset += work.counts[feed++]) {
        const int64_t from = std::max(offset, begin), to = std::min(offset + work.counts[feed], end);
        const int64_t first = work.use_begins[feed], last = work.use_begins[feed + 1];
        for (int64_t token = from; token < to && first < last; ++token) {
            slot_of_[token - begin] = slots_;
            for (int64_t i = first; i < last; ++i)
                uses_.push_back({token - begin, slots_, i - first, work.adapter + work.use_adapters[i],
                                 work.use_weights[i]});
            ++slots_;
        }
    }
    std::stable_sort(uses_.begin(), uses_.end(), [](const Use& a, const Use& b) {
        return a.turn != b.turn ? a.turn < b.turn : a.adapter < b.adapter;
    });
    for (int64_t i = 0, next = 0; i < count(); i = next) {
        const auto together = [&](const Use& one) {
            return one.turn == uses_[i].turn && one.adapter == uses_[i].adapter;
        };
        while (next < count() && next - i < kFewApart && together(uses_[next])) ++next;
        tiles_.push_back({uses_[i].adapter, i, next - i});
        most_ = std::max(most_, uses_[i].adapter->most);
        most_down_ = std::max(most_down_, uses_[i].adapter->most_down);
    }
}

int64_t Uses::panels(int64_t index, ReadOf read) const {
    int64_t most = 0;
    for (const UseTile& tile : tiles_)
        most = std::max(most, panels_of(tile.adapter->layer[index].down[read].rows));
    return most;
}

int64_t Uses::folds(int64_t index, ReadOf read) const {
    int64_t most = 0;
    for (const UseTile& tile : tiles_) most = std::max(most, tile.adapter->layer[index].folds[read].count);
    return most;
}

int64_t Uses::most_turned() const {
    int64_t total = 0;
    for (const Use& use : uses_) total += use.adapter->most_turns;
    return total;
}

bool Uses::change(int64_t index, ChangedMap map) const {
    return map != kUnchanged && std::any_of(tiles_.begin(), tiles_.end(), [&](const UseTile& tile) {
               const LayerChanges& layer = tile.adapter->layer[index];
               return layer.maps[map].count > 0 || layer.turned[map].count > 0;
           });
}

TurnedRows::TurnedRows(const Uses& uses, int64_t index, ReadOf read) : uses_(&uses) {
    if (uses.empty()) return;
    for (int64_t use = uses.count() - 1; use >= 0; --use) {
        const Turns& turns = uses[use].adapter->layer[index].turns[read];
        for (int64_t i = 0; i < turns.count; ++i) rows_.push_back({use, turns.each + i, -1});
    }
    if (rows_.empty()) return;
    std::stable_sort(rows_.begin(), rows_.end(), [&](const TurnedRow& a, const TurnedRow& b) {
        return uses[a.use].slot < uses[b.use].slot;
    });
    begins_.assign(uses.slots() + 1, 0);
    for (const TurnedRow& row : rows_) ++begins_[uses[row.use].slot + 1];
    for (int64_t slot = 0; slot < uses.slots(); ++slot) begins_[slot + 1] += begins_[slot];
    for (TurnedRow& row : rows_)
        row.from = inside(uses[row.use].slot, uses[row.use].turn, row.turn->stretch);
}

int64_t TurnedRows::inside(int64_t slot, int64_t turn, int64_t stretch) const {
    if (rows_.empty()) return -1;
    for (int64_t i = begins_[slot + 1] - 1; i >= begins_[slot]; --i)
        if (rows_[i].turn->stretch == stretch && (*uses_)[rows_[i].use].turn > turn) return i;
    return -1;
}

namespace {

// How many pieces have sums of their own: of what `down` reads, and of what `up` reads. Few uses are
// shared out piece by piece; since pieces do not depend on how many uses there are, no bit does.
constexpr int64_t kPieces = 4, kPiecesOfUp = 2;

}  // namespace

void Runner::check_uses(const Work& work) const {
    if (!work.use_begins) return;
    bool fit = work.use_begins[0] == 0;
    for (int64_t feed = 0; fit && feed < work.feeds; ++feed)
        fit = work.use_begins[feed] <= work.use_begins[feed + 1];
    for (int64_t i = 0; fit && i < work.use_begins[work.feeds]; ++i)
        fit = work.use_adapters[i] >= 0 && work.use_adapters[i] < work.adapters;
    for (int64_t i = 0; fit && i < work.adapters; ++i) fit = work.adapter[i].layers >= model_.layers;
    if (!fit) throw std::logic_error("a feed asks for an adapter that there is not");
}

namespace {

// Turns a row of inputs where it lies.
void turn_row(const Turn& turn, float weight, int64_t columns, float* x) {
    if (turn.factors) {
        for (int64_t i = 0; i < columns; ++i) x[i] *= 1.0f + (turn.factors[i] - 1.0f) * weight;
        return;
    }
    const int64_t size = turn.size;
    std::vector<float> made(size);
    for (int64_t block = 0; block < turn.blocks; ++block, x += size) {
        const float* by = turn.blocks_of_turns + block * size * size;
        std::fill(made.begin(), made.end(), 0.0f);
        for (int64_t k = 0; k < size; ++k)
            for (int64_t i = 0; i < size; ++i) made[i] += x[k] * by[k * size + i];
        for (int64_t i = 0; i < size; ++i) x[i] = weight == 1.0f ? made[i] : x[i] + (made[i] - x[i]) * weight;
    }
}

// Multiplies from both sides.
void fold_row(const Fold& fold, const float* x, float* to) {
    std::vector<float> half(fold.columns * fold.inner_rows), row(fold.inner_rows);
    for (int64_t i = 0; i < fold.columns; ++i)
        for (int64_t k = 0; k < fold.inner_columns; ++k) {
            const float by = x[i * fold.inner_columns + k];
            const float* right = fold.right + k * fold.inner_rows;
            for (int64_t j = 0; j < fold.inner_rows; ++j) half[i * fold.inner_rows + j] += by * right[j];
        }
    std::fill_n(to, fold.size, 0.0f);
    for (int64_t i = 0; i < fold.rows; ++i) {
        std::fill(row.begin(), row.end(), 0.0f);
        for (int64_t k = 0; k < fold.columns; ++k) {
            const float by = fold.left[i * fold.columns + k];
            for (int64_t j = 0; j < fold.inner_rows; ++j) row[j] += by * half[k * fold.inner_rows + j];
        }
        for (int64_t j = 0; j < fold.inner_rows; ++j) to[fold.places[i * fold.inner_rows + j]] = row[j];
    }
}

}  // namespace

const Linear& Runner::map_of(int64_t index, ChangedMap map) const {
    const Layer& layer = layers_[index];
    if (map == kQkv) return layer.qkv;
    if (map == kOut) return layer.out;
    return map == kGate ? layer.dense.gate : map == kUp ? layer.dense.up : layer.dense.down;
}

PanelChanges Runner::changes_of(const Member& member, const Part& part, int64_t index, ChangedMap map) {
    if (part.uses.empty() || !part.uses.change(index, map)) return {};
    // Of two maps that read the same, the second has room after the first.
    const int64_t before = map == kUp ? PanelChanges::room_for(part.uses.slots()) : 0;
    const ReadOf read = everystep::read_of(map);
    return {part.uses, index, map, map_of(index, map), inputs_by(read).inputs(), turned_by(read).inputs(),
            reduced_.data(), scratch_[member.index].data() + before};
}

const float* Runner::given_to(const Part& part, ReadOf read, const TurnedRows& turned, int64_t use,
                              int64_t stretch) {
    const Use& own = part.uses[use];
    const int64_t row = turned.inside(own.slot, own.turn, stretch);
    return row < 0 ? inputs_by(read).row(own.row) : turned_by(read).row(row);
}

// Makes the rows that turns make, each from the beginning: few stand around each other.
void Runner::turn(Member& member, const Part& part, int64_t index, ReadOf read, const TurnedRows& turned) {
    const Layer& layer = layers_[index];
    const bool coded = read == kByUp ? mlp_reads_[index].codes
                                     : reads_codes(read == kByQkv   ? layer.qkv
                                                   : read == kByOut ? layer.out
                                                                    : layer.dense.down);
    InputBuffer& to = turned_by(read);
    const int64_t columns = to.inputs().columns;
    crew_->share(member, turned.count(), [&](int64_t row) {
        std::vector<int64_t> around;
        for (int64_t one = row; one >= 0; one = turned[one].from) around.push_back(one);
        std::copy_n(inputs_by(read).row(part.uses[turned[row].use].row), columns, to.row(row));
        for (auto one = around.rbegin(); one != around.rend(); ++one)
            turn_row(*turned[*one].turn, part.uses[turned[*one].use].weight, columns, to.row(row));
        if (coded) quantise_row(to.inputs(), row);
    });
}

void Runner::fold(Member& member, const Part& part, int64_t index, ReadOf read, const TurnedRows& turned) {
    const Uses& uses = part.uses;
    const int64_t most = uses.folds(index, read);
    crew_->share(member, uses.count() * most, [&](int64_t item) {
        const int64_t use = item / most;
        const Folds& folds = uses[use].adapter->layer[index].folds[read];
        if (item % most >= folds.count) return;
        const Fold& fold = folds.each[item % most];
        fold_row(fold, given_to(part, read, turned, use, fold.stretch),
                 reduced_.data() + use * uses.most() + fold.first);
    });
}

// Makes once more what `down` makes for uses that stand inside of a turn.
void Runner::reduce_turned(Member& member, const Part& part, int64_t index, ReadOf read,
                           const TurnedRows& turned) {
    const Uses& uses = part.uses;
    crew_->share(member, uses.count(), [&](int64_t use) {
        const LayerChanges& layer = uses[use].adapter->layer[index];
        const Matrix& w = layer.down[read];
        for (int64_t map = 0; map < kChangedMaps; ++map) {
            if (everystep::read_of(ChangedMap(map)) != read) continue;
            for (int64_t i = 0; i < layer.maps[map].count; ++i) {
                const Change& change = layer.maps[map].each[i];
                if (change.first < 0 || change.up.rows == 0) continue;
                if (turned.inside(uses[use].slot, uses[use].turn, change.stretch) < 0) continue;
                const float* row = given_to(part, read, turned, use, change.stretch);
                float* to = reduced_.data() + use * uses.most();
                const int64_t end = change.first + change.up.columns;
                for (int64_t panel = change.first / kPanel; panel * kPanel < end; ++panel) {
                    simd::Floats sum = simd::splat(0.0f);
                    tile_apart(1, w, panel, 1, &row, {w.columns, kPieces}, 0, kPieces, &sum);
                    float made[kPanel];
                    simd::store(made, sum);
                    for (int64_t lane = 0; lane < kPanel; ++lane) {
                        const int64_t at = panel * kPanel + lane;
                        if (at >= change.first && at < end) to[at] = made[lane];
                    }
                }
            }
        }
    });
}

// Makes of what a map reads what its changes read of it.
void Runner::reduce(Member& member, const Part& part, int64_t index, ReadOf read) {
    const Uses& uses = part.uses;
    if (uses.empty()) return;
    const TurnedRows turned(uses, index, read);
    if (!turned.empty()) turn(member, part, index, read, turned);
    if (uses.panels(index, read) > 0) {
        reduce_down(member, part, index, read);
        if (!turned.empty()) reduce_turned(member, part, index, read, turned);
    }
    // What is folded lies behind: sums of pieces are written as far as the largest `down` reaches.
    if (uses.folds(index, read) > 0) fold(member, part, index, read, turned);
}

void Runner::reduce_down(Member& member, const Part& part, int64_t index, ReadOf read) {
    const Uses& uses = part.uses;
    const InputBuffer& in = inputs_by(read);
    const int64_t panels = uses.panels(index, read);
    const int64_t items = int64_t(uses.tiles().size()) * panels;
    const float* values = in.inputs().values;
    const int64_t columns = in.inputs().columns;
    const auto multiply = [&](int64_t item, int64_t first, int64_t last, auto place) {
        const UseTile& tile = uses.tiles()[item / panels];
        const Matrix& w = tile.adapter->layer[index].down[read];
        const int64_t panel = item % panels;
        if (panel >= panels_of(w.rows)) return;
        const float* rows[kFewApart];
        for (int64_t i = 0; i < tile.count; ++i) rows[i] = values + uses[tile.first + i].row * columns;
        simd::Floats sums[kFewApart];
        each_few(tile.count, [&](auto few, int64_t at) {
            tile_apart(few, w, panel, 1, rows + at, {w.columns, kPieces}, first, last, sums + at);
        });
        for (int64_t i = 0; i < tile.count; ++i)
            simd::store(place(tile.first + i) + panel * kPanel, sums[i]);
    };
    const auto whole = [&](int64_t use) { return reduced_.data() + use * uses.most(); };
    if (items >= 2 * crew_->size() || crew_->size() == 1)
        return crew_->share(member, items, [&](int64_t item) { multiply(item, 0, kPieces, whole); });
    const auto piece_of = [&](int64_t use, int64_t piece) {
        return whole(uses.count()) + (piece * uses.count() + use) * uses.most_down();
    };
    crew_->share(
        member, items * kPieces,
        [&](int64_t item) {
            const int64_t piece = item % kPieces;
            multiply(item / kPieces, piece, piece + 1, [&](int64_t use) { return piece_of(use, piece); });
        },
        [&] {
            for (int64_t use = 0; use < uses.count(); ++use)
                for (int64_t at = 0; at < panels * kPanel; at += kPanel) {
                    simd::Floats sum = simd::load(piece_of(use, 0) + at);
                    for (int64_t piece = 1; piece < kPieces; ++piece)
                        sum = simd::add(sum, simd::load(piece_of(use, piece) + at));
                    simd::store(whole(use) + at, sum);
                }
        });
}

int64_t Runner::reduced_size(const Uses& uses) {
    return uses.count() * (uses.most() + kPieces * uses.most_down());
}

PanelChanges::PanelChanges(const Uses& uses, int64_t index, ChangedMap map, const Linear& linear,
                           const Inputs& in, const Inputs& turned, const float* reduced, float* room)
    : uses_(&uses), index_(index), map_(map), linear_(&linear), in_(&in), turned_(&turned),
      turned_rows_(uses, index, read_of(map)), reduced_(reduced), room_(room) {
    for (const UseTile& tile : uses.tiles()) {
        const Changes& changes = tile.adapter->layer[index].maps[map];
        for (int64_t i = 0; i < changes.count; ++i) scales_ = scales_ || changes.each[i].gain;
        if (!turned_rows_.empty() && std::find(adapters_.begin(), adapters_.end(), tile.adapter) == adapters_.end())
            adapters_.push_back(tile.adapter);
    }
}

simd::Floats PanelChanges::turned(int64_t panel, int64_t slot, simd::Floats x) const {
    std::array<float, kPanel> found;
    std::vector<int64_t> seen;
    simd::store(found.data(), x);
    for (const Adapter* adapter : adapters_) {
        const TurnedMap& map = adapter->layer[index_].turned[map_];
        for (int64_t i = 0; i < map.count; ++i) {
            const TurnedPanels& own = map.each[i];
            if (panel < own.panel || panel >= own.panel + own.panels) continue;
            if (std::find(seen.begin(), seen.end(), own.stretch) != seen.end()) continue;
            const int64_t row = turned_rows_.inside(slot, -1, own.stretch);
            if (row < 0) continue;
            seen.push_back(own.stretch);
            simd::Floats out[1];
            panel_of(*linear_, panel).products(*turned_, row, out);
            std::array<float, kPanel> made;
            simd::store(made.data(), out[0]);
            const float* lanes = own.lanes + (panel - own.panel) * kPanel;
            for (int64_t lane = 0; lane < kPanel; ++lane)
                if (lanes[lane] > 0) found[lane] = made[lane];
        }
    }
    return simd::load(found.data());
}

// Sums and factors begin as those of no change, and each use in turn changes them.
void PanelChanges::compute(int64_t panel) {
    begin_ = panel, end_ = panel + at_once(uses_->slots());
    const int64_t size = uses_->slots() * kPanel;
    for (int64_t i = begin_; i < end_; ++i) {
        std::fill_n(sums_of(i), size, 0.0f);
        if (scales_) std::fill_n(sums_of(i) + size, size, 1.0f);
    }
    for (const UseTile& tile : uses_->tiles()) {
        const Changes& changes = tile.adapter->layer[index_].maps[map_];
        for (int64_t i = 0; i < changes.count; ++i) change_tile(tile, changes.each[i]);
    }
}

void PanelChanges::change_tile(const UseTile& tile, const Change& change) const {
    using namespace simd;
    const Uses& uses = *uses_;
    const int64_t first = std::max(begin_, change.panel), last = std::min(end_, change.panel + change.panels);
    if (first >= last) return;
    const int64_t panels = last - first, own = first - change.panel;
    const float* rows[kFewApart];
    for (int64_t i = 0; i < tile.count; ++i) {
        const int64_t use = tile.first + i;
        if (change.first >= 0) {
            rows[i] = reduced_ + use * uses.most() + change.first;
            continue;
        }
        const int64_t turned = turned_rows_.inside(uses[use].slot, uses[use].turn, change.stretch);
        rows[i] = turned < 0 ? in_->values + uses[use].row * in_->columns
                             : turned_->values + turned * turned_->columns;
    }
    each_few(tile.count, [&](auto few, int64_t at) {
        Floats added[kMostAtOnce * few];
        std::fill_n(added, panels * few, splat(0.0f));
        if (change.up.rows > 0)
            tile_apart(few, change.up, own, panels, rows + at, {change.up.columns, kPiecesOfUp}, 0,
                       kPiecesOfUp, added);
        for (int64_t i = 0; i < panels; ++i)
            for (int m = 0; m < few; ++m) {
                const Use& use = uses[tile.first + at + m];
                float* sum = sums_of(first + i) + use.slot * kPanel;
                Floats more = added[i * few + m], before = load(sum);
                if (change.first >= 0 && change.up.rows == 0) more = load(rows[at + m] + (own + i) * kPanel);
                if (change.shift) more = add(more, load(change.shift + (own + i) * kPanel));
                if (change.gain) {
                    float* factor = sum + uses.slots() * kPanel;
                    const Floats gain = load(change.gain + (own + i) * kPanel);
                    const Floats by = fma(gain, splat(use.weight), splat(1.0f));
                    store(factor, mul(load(factor), by));
                    before = mul(before, by);
                }
                store(sum, fma(more, splat(use.weight * change.scale), before));
            }
    });
}

}  // namespace everystep
