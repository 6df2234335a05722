#include "step.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>

#include "rows.h"

namespace everystep {
namespace {

constexpr int64_t kSlabPages = 64;

// Few rows stream weights, best in long runs; many rows compute, and small chunks come out even.
int64_t chunk_of(int64_t panels, int64_t rows, int members) {
    const int64_t chunks = members * (rows <= 8 ? 2 : 8);
    return std::max<int64_t>(1, (panels + chunks - 1) / chunks);
}

bool reads_codes(const Linear& linear) {
    return std::any_of(linear.parts, linear.parts + linear.count, [](const Matrix& part) {
        return static_cast<Format>(part.format) != Format::kFloat;
    });
}

bool mlp_reads_codes(const Layer& layer) { return reads_codes(layer.gate) || reads_codes(layer.up); }

}  // namespace

void Pages::reserve(int64_t count) {
    while (this->count() < count) {
        // Fresh memory is zeros, and takes room only when it is written.
        void* slab = std::calloc(kSlabPages * floats_ + simd::kLanes, sizeof(float));
        if (!slab) throw std::bad_alloc();
        slabs_.emplace_back(slab);
        const auto address = reinterpret_cast<uintptr_t>(slab);
        float* first = reinterpret_cast<float*>((address + 63) / 64 * 64);
        for (int64_t i = 0; i < kSlabPages; ++i) pages_.push_back(first + i * floats_);
    }
}

void Pages::copy(int64_t from, int64_t to) {
    std::copy_n(pages_[from], floats_, pages_[to]);
}

InputBuffer::InputBuffer(int64_t rows, int64_t columns)
    : values_(rows * columns),
      scales_(rows * blocks_of(columns)),
      codes_(rows * blocks_of(columns) * kBlock),
      sums_(rows * blocks_of(columns)),
      inputs_{values_.data(), columns,        blocks_of(columns),
              codes_.data(),  scales_.data(), sums_.data()} {}

Runner::Runner(const Model& model)
    : model_(model),
      layers_(model.layer, model.layer + model.layers),
      shape_{model.kv_heads, model.head_dim},
      pages_(shape_.layer() * model.layers),
      hidden_(kMostTokens * model.width),
      qkv_(kMostTokens * (model.heads + 2 * model.kv_heads) * model.head_dim),
      added_(kMostTokens * model.width),
      normed_(kMostTokens, model.width),
      mixed_(kMostTokens, model.heads * model.head_dim),
      inner_(kMostTokens, model.inner),
      last_(kMostTokens, model.width) {}

void Runner::run(const Work& work, int threads) {
    if (std::any_of(work.ids, work.ids + work.tokens,
                    [&](int64_t id) { return id < -1 || id >= model_.vocabulary; }))
        throw std::out_of_range("an id beyond the vocabulary");
    list_wanted(work);
    if (!crew_ || crew_->size() != threads) crew_ = std::make_unique<Crew>(threads);
    scratch_.resize(threads);
    for (int64_t i = 0; i < work.copies; ++i) pages_.copy(work.copy_from[i], work.copy_to[i]);
    for (int64_t begin = 0; begin < work.tokens; begin += kMostTokens)
        run_part(make_part(work, begin));
}

void Runner::list_wanted(const Work& work) {
    wanted_.clear();
    int64_t end = 0;
    for (int64_t feed = 0; feed < work.feeds; ++feed) {
        end += work.counts[feed];
        for (int64_t i = work.wanted[feed]; i > 0; --i) wanted_.push_back(end - i);
    }
}

int64_t Runner::group_tiles() const {
    const int64_t group = model_.heads / model_.kv_heads;
    return (group + kMostQueries - 1) / kMostQueries;
}

Runner::Part Runner::make_part(const Work& work, int64_t begin) const {
    Part part{work, begin, std::min(begin + kMostTokens, work.tokens), {}, {}, {}, 0, 0};
    const int64_t group = model_.heads / model_.kv_heads;
    // Six queries keep all their sums in registers; a larger group is split.
    const int64_t together = std::max<int64_t>(1, 6 / group);
    int64_t offset = 0;
    for (int64_t feed = 0; feed < work.feeds; offset += work.counts[feed++]) {
        const int64_t from = std::max(offset, part.begin);
        const int64_t to = std::min(offset + work.counts[feed], part.end);
        for (int64_t token = from; token < to; ++token) {
            part.row_of.push_back(work.rows[feed]);
            part.position_of.push_back(work.starts[feed] + token - offset);
        }
        for (int64_t token = from; token < to; token += together)
            part.tiles.push_back({work.rows[feed], token - part.begin, std::min(together, to - token),
                                  work.starts[feed] + token - offset});
    }
    const auto place = [&](int64_t token) {
        return std::lower_bound(wanted_.begin(), wanted_.end(), token) - wanted_.begin();
    };
    part.wanted_begin = place(part.begin);
    part.wanted_end = place(part.end);
    return part;
}

void Runner::run_part(const Part& part) {
    int64_t longest = 0;
    for (const Tile& tile : part.tiles) longest = std::max(longest, tile.position + tile.count);
    const int64_t room = kMostQueries * (whole_vectors(longest) + whole_vectors(model_.head_dim)) +
                         model_.head_dim;
    for (std::vector<float>& scratch : scratch_)
        if (int64_t(scratch.size()) < room) scratch.resize(room * 3 / 2);
    crew_->run([&](Member& member) {
        embed(member, part);
        for (int64_t index = 0; index < model_.layers; ++index) run_layer(member, part, index);
        finish(member, part);
    });
}

void Runner::embed(Member& member, const Part& part) {
    crew_->share(member, part.tokens(), 1, [&](int64_t token, int64_t) {
        float* to = hidden_.data() + token * model_.width;
        const int64_t id = part.work.ids[part.begin + token];
        if (id >= 0) {
            read_row(model_.embedding, id, to);
            if (model_.embed_scale != 0)
                for (int64_t i = 0; i < model_.width; ++i) to[i] *= model_.embed_scale;
            return;
        }
        for (int64_t i = 0; i < part.work.embeds; ++i) {
            const Embeds& given = part.work.embed[i];
            const int64_t at = part.begin + token - given.offset;
            if (at >= 0 && at < given.count)
                std::copy_n(given.values + at * model_.width, model_.width, to);
        }
    });
}

void Runner::run_layer(Member& member, const Part& part, int64_t index) {
    attention_block(member, part, index);
    mlp_block(member, part, index);
}

void Runner::attention_block(Member& member, const Part& part, int64_t index) {
    const Layer& layer = layers_[index];
    const int64_t rows = part.tokens();
    const int64_t width = (model_.heads + 2 * model_.kv_heads) * model_.head_dim;
    // Without a norm of its own the MLP reads what attention reads.
    const bool coded = reads_codes(layer.qkv) || (!layer.mlp.weight && mlp_reads_codes(layer));
    norm_and_code(member, rows, layer.attention, normed_, coded);
    product(member, layer.qkv, normed_.inputs(), rows,
            [&](int64_t row, int64_t column, simd::Floats x, int count) {
                write(qkv_.data() + row * width + column, x, count);
            });
    crew_->share(member, rows, 1, [&](int64_t token, int64_t) { place(part, index, token); });
    const int64_t heads = model_.kv_heads * group_tiles();
    crew_->share(member, int64_t(part.tiles.size()) * heads, 1, [&](int64_t item, int64_t) {
        const int64_t head = item % heads;
        attend_one(part, index, part.tiles[item / heads], head / group_tiles(), head % group_tiles(),
                   scratch_[member.index].data());
    });
    code(member, rows, mixed_, layer.out);
    add_output(member, rows, layer.out, mixed_, layer.attention_post);
}

void Runner::mlp_block(Member& member, const Part& part, int64_t index) {
    const Layer& layer = layers_[index];
    const int64_t rows = part.tokens();
    if (layer.mlp.weight)
        norm_and_code(member, rows, layer.mlp, normed_, mlp_reads_codes(layer));
    const Activation kind = static_cast<Activation>(model_.activation);
    const bool gated = layer.gate.count > 0;
    const Inputs& in = normed_.inputs();
    const Linear& first = gated ? layer.gate : layer.up;
    product(member, first, in, rows, [&](int64_t row, int64_t column, simd::Floats x, int count) {
        write(inner_.row(row) + column, activate(kind, x), count);
    });
    if (gated)
        product(member, layer.up, in, rows, [&](int64_t row, int64_t column, simd::Floats x, int count) {
            float* at = inner_.row(row) + column;
            write(at, simd::mul(read(at, count), x), count);
        });
    code(member, rows, inner_, layer.down);
    add_output(member, rows, layer.down, inner_, layer.mlp_post);
}

void Runner::norm_and_code(Member& member, int64_t rows, const Norm& norm, InputBuffer& to,
                           bool coded) {
    crew_->share(member, rows, 1, [&](int64_t row, int64_t) {
        normalise(static_cast<NormKind>(model_.norm_kind), hidden_.data() + row * model_.width,
                  model_.width, model_.eps, norm, to.row(row));
        if (coded) quantise_row(to.inputs(), row);
    });
}

void Runner::code(Member& member, int64_t rows, InputBuffer& of, const Linear& linear) {
    if (!reads_codes(linear)) return;
    crew_->share(member, rows, 1, [&](int64_t row, int64_t) { quantise_row(of.inputs(), row); });
}

void Runner::add_output(Member& member, int64_t rows, const Linear& linear, const InputBuffer& in,
                        const Norm& post) {
    float* to = post.weight ? added_.data() : hidden_.data();
    product(member, linear, in.inputs(), rows,
            [&](int64_t row, int64_t column, simd::Floats x, int count) {
                float* at = to + row * model_.width + column;
                write(at, post.weight ? x : simd::add(read(at, count), x), count);
            });
    if (!post.weight) return;
    crew_->share(member, rows, 1, [&](int64_t row, int64_t) {
        float* added = added_.data() + row * model_.width;
        normalise(static_cast<NormKind>(model_.norm_kind), added, model_.width, model_.eps, post, added);
        add_to(hidden_.data() + row * model_.width, added, model_.width);
    });
}

// Calls `use(row, column, values, count)` with every 16 outputs of every row, bias included.
template <class Use>
void Runner::product(Member& member, const Linear& linear, const Inputs& in, int64_t rows, Use use) {
    int64_t panels = 0;
    for (int64_t i = 0; i < linear.count; ++i) panels += panels_of(linear.parts[i].rows);
    crew_->share(member, panels, chunk_of(panels, rows, crew_->size()), [&](int64_t begin, int64_t end) {
        int64_t before = 0, outputs = 0;
        for (int64_t i = 0; i < linear.count; ++i) {
            const Matrix& w = linear.parts[i];
            const int64_t last = std::min(end - before, panels_of(w.rows));
            for (int64_t panel = std::max<int64_t>(0, begin - before); panel < last; ++panel) {
                const int64_t column = outputs + panel * kPanel;
                const int count = int(std::min(kPanel, w.rows - panel * kPanel));
                const simd::Floats bias =
                    linear.bias ? read(linear.bias + column, count) : simd::splat(0.0f);
                multiply(w, panel, in, rows, [&](int64_t row, int tile, const simd::Floats* out) {
                    for (int m = 0; m < tile; ++m)
                        use(row + m, column, linear.bias ? simd::add(out[m], bias) : out[m], count);
                });
            }
            before += panels_of(w.rows);
            outputs += w.rows;
        }
    });
}

// Turns a token's queries and keys, and writes its keys and values into their page.
void Runner::place(const Part& part, int64_t index, int64_t token) {
    const Layer& layer = layers_[index];
    const int64_t dim = model_.head_dim, turning = model_.heads + model_.kv_heads;
    float* qkv = qkv_.data() + token * (turning + model_.kv_heads) * dim;
    for (int64_t head = 0; head < turning; ++head) {
        float* at = qkv + head * dim;
        const Norm& norm = head < model_.heads ? layer.q : layer.k;
        if (norm.weight)
            normalise(static_cast<NormKind>(model_.norm_kind), at, dim, model_.eps, norm, at);
        if (layer.rope < 0) continue;
        const Rope& rope = part.work.rope[layer.rope];
        const int64_t row =
            rope.row ? rope.row[part.begin + token] : part.position_of[token];
        float swapped[1024];
        rotate(at, rope.dim, rope.cos + row * rope.dim, rope.sin + row * rope.dim, swapped);
    }
    const int32_t* numbers = part.work.pages + part.row_of[token] * part.work.stride;
    for (int64_t head = 0; head < model_.kv_heads; ++head) {
        const int64_t offset = index * shape_.layer() + head * shape_.head();
        write_position({pages_.data(), numbers, offset, shape_}, part.position_of[token],
                       qkv + (model_.heads + head) * dim, qkv + (turning + head) * dim);
    }
}

void Runner::attend_one(const Part& part, int64_t index, const Tile& tile, int64_t head,
                        int64_t group_tile, float* scratch) {
    const int64_t dim = model_.head_dim, apart = whole_vectors(dim);
    const int64_t group = model_.heads / model_.kv_heads;
    const int64_t first = group_tile * kMostQueries;
    const int64_t heads = std::min<int64_t>(kMostQueries, group - first);
    const int64_t stride = (model_.heads + 2 * model_.kv_heads) * dim;
    Queries queries;
    queries.count = int(tile.count * heads);
    queries.values = scratch;
    queries.softcap = model_.softcap;
    const int64_t window = layers_[index].window;
    for (int64_t i = 0; i < queries.count; ++i) {
        const int64_t token = i / heads, position = tile.position + token;
        const float* q =
            qkv_.data() + (tile.token + token) * stride + (head * group + first + i % heads) * dim;
        for (int64_t d = 0; d < dim; ++d) scratch[i * apart + d] = q[d] * model_.scale;
        queries.last[i] = position;
        queries.first[i] = window ? std::max<int64_t>(0, position - window + 1) : 0;
    }
    const int32_t* numbers = part.work.pages + tile.row * part.work.stride;
    const int64_t offset = index * shape_.layer() + head * shape_.head();
    attend({pages_.data(), numbers, offset, shape_}, queries, scratch + kMostQueries * apart);
    for (int64_t i = 0; i < queries.count; ++i)
        std::copy_n(scratch + i * apart, dim,
                    mixed_.row(tile.token + i / heads) + (head * group + first + i % heads) * dim);
}

void Runner::finish(Member& member, const Part& part) {
    const Work& work = part.work;
    const NormKind kind = static_cast<NormKind>(model_.norm_kind);
    if (work.hidden)
        crew_->share(member, part.tokens(), 1, [&](int64_t row, int64_t) {
            normalise(kind, hidden_.data() + row * model_.width, model_.width, model_.eps, model_.norm,
                      work.hidden + (part.begin + row) * model_.width);
        });
    const int64_t rows = part.wanted_end - part.wanted_begin;
    if (rows == 0) return;
    const bool coded = reads_codes(model_.head);
    crew_->share(member, rows, 1, [&](int64_t row, int64_t) {
        const int64_t token = wanted_[part.wanted_begin + row] - part.begin;
        normalise(kind, hidden_.data() + token * model_.width, model_.width, model_.eps, model_.norm,
                  last_.row(row));
        if (coded) quantise_row(last_.inputs(), row);
    });
    const float cap = model_.final_softcap;
    product(member, model_.head, last_.inputs(), rows, [&](int64_t row, int64_t column, simd::Floats x, int count) {
        using namespace simd;
        if (cap != 0) x = mul(tanh(div(x, splat(cap))), splat(cap));
        write(work.logits + (part.wanted_begin + row) * model_.vocabulary + column, x, count);
    });
}

template <class Use>
void Runner::each_cached(const int32_t* numbers, int64_t length, Use use) const {
    const int64_t dim = shape_.dim, width = whole_vectors(dim), plane = length * dim;
    for (int64_t layer = 0; layer < model_.layers; ++layer)
        for (int64_t head = 0; head < shape_.kv_heads; ++head) {
            const int64_t offset = layer * shape_.layer() + head * shape_.head();
            const int64_t first = (layer * 2 * shape_.kv_heads + head) * plane;
            for (int64_t position = 0; position < length; ++position) {
                float* page = pages_.data()[numbers[position / kPagePositions]] + offset;
                const int64_t lane = position % kPagePositions;
                for (int64_t d = 0; d < dim; ++d) {
                    const int64_t place = first + position * dim + d;
                    use(place, page + d * kPagePositions + lane);
                    use(place + shape_.kv_heads * plane, page + shape_.keys() + lane * width + d);
                }
            }
        }
}

}  // namespace everystep

using namespace everystep;

extern "C" {

int32_t es_interface() { return 3; }

// Sizes of the structures, so that their mirror in Python can be checked.
void es_sizes(int64_t* out) {
    out[0] = sizeof(Matrix);
    out[1] = sizeof(Linear);
    out[2] = sizeof(Layer);
    out[3] = sizeof(Model);
    out[4] = sizeof(Rope);
    out[5] = sizeof(Embeds);
    out[6] = sizeof(Work);
}

void* es_open(const Model* model) {
    try {
        return new Runner(*model);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void es_close(void* runner) { delete static_cast<Runner*>(runner); }

// 0, or 1 without the memory for it.
int32_t es_reserve(void* runner, int64_t pages) {
    try {
        static_cast<Runner*>(runner)->pages().reserve(pages);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

// What a row with the given pages holds, as (layers, 2, kv_heads, length, head_dim).
void es_export(void* runner, const int32_t* pages, int64_t length, float* out) {
    static_cast<Runner*>(runner)->each_cached(
        pages, length, [&](int64_t place, const float* held) { out[place] = *held; });
}

// The opposite: fills the pages of a row.
void es_import(void* runner, const int32_t* pages, int64_t length, const float* values) {
    static_cast<Runner*>(runner)->each_cached(
        pages, length, [&](int64_t place, float* held) { *held = values[place]; });
}

// 0, 1 without the memory for it, or 2 where an id is beyond the vocabulary.
int32_t es_run(void* runner, const Work* work, int32_t threads) {
    try {
        static_cast<Runner*>(runner)->run(*work, threads);
        return 0;
    } catch (const std::out_of_range&) {
        return 2;
    } catch (const std::exception&) {
        return 1;
    }
}
}
