// What the library knows of a stack of layers and of one step. Plain data: whoever fills it keeps
// what it points to alive. The layout is mirrored by library.py, which checks sizes at load time.
#pragma once

#include <cstdint>

namespace everystep {

enum class Format : int32_t {
    kFloat = 0,
    kInt8 = 1,
    kQ8 = 2,
    kQ4 = 3,
    kQ4Min = 4,
    kHalf = 5,
    kBrain = 6,
    kQ4K = 7,
    kQ5K = 8,
    kQ6K = 9,
    kQ5 = 10
};

// A matrix (rows, columns) in panels of 16 rows, blocks of 32 columns; see pack.h.
struct Matrix {
    int32_t format;
    int32_t pad;
    int64_t rows, columns;
    const uint8_t* data;
    const float* row_scales;  // kInt8 only, padded to whole panels
};

// Up to three matrices with the same input, whose outputs stand one after another.
struct Linear {
    int64_t count;
    Matrix parts[3];
    const float* bias;  // or null
};

struct Norm {
    const float* weight;  // null: no such norm
    const float* bias;    // or null
};

struct Mlp {
    Linear gate, up, down;  // a gate without parts: none
};

// MLPs of which a router chooses some for each row; no count: none.
struct Experts {
    int64_t count, chosen;
    int64_t normalised;  // whether the shares of the chosen add up to 1
    Linear router;
    const Mlp* each;  // (count,)
};

// What a layer has in place of attention and an MLP: a convolution over its last inputs, then a scan,
// whose states a row keeps instead of keys and values. `inward` makes what enters, and its gate;
// `select` the inputs of step sizes, what is written to states and how they are read; no `inward`: none.
struct Recurrence {
    Linear inward, select, step;
    const float* conv;       // (kernel, inner), for the oldest input first
    const float* conv_bias;  // (inner,), or null
    const float* decay;      // (states, inner), negative
    const float* skip;       // (inner,)
};

// It has an MLP or experts, or a recurrence. Where `across_q` has parts, it also looks at keys and
// values that `across_kv` makes of encoder states.
struct Layer {
    Linear qkv, out, across_q, across_kv, across_out;
    Mlp dense;
    Experts experts;
    Recurrence recurrence;
    Norm attention, mlp, attention_post, mlp_post, q, k, across, across_post;
    int64_t rope;    // which table, or -1
    int64_t window;  // 0: none
    float factor;    // of scores, beside the model's scale
    float pad;
};

// The type that keys and values are kept in; codes have one scale per position and head.
enum class KvType : int32_t { kFloat32 = 0, kFloat16 = 1, kInt8 = 2 };

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1, kGelu = 2, kRelu = 3 };
enum class NormKind : int32_t { kRms = 0, kLayer = 1 };

// A stack of layers: a decoder, or an encoder, which has no head. What a layer has no norm for is read
// as it is, but for a parallel MLP, which shares that of attention.
struct Model {
    int64_t layers, width, heads, kv_heads, head_dim, inner, vocabulary;
    int64_t places;  // how many positions have an embedding
    // Of recurrences: what a convolution reads, states per channel, inputs of step sizes; 0: there are none.
    int64_t kernel, states, rank;
    int32_t norm_kind, activation;
    int32_t parallel;  // whether an MLP reads the input of its layer
    int32_t whole_qk;  // whether a norm of queries or keys is one of all heads
    int32_t norms_sums;  // whether a norm after a part is one of the sum, not of what is added
    int32_t both_ways;   // whether a position sees those after it: an encoder
    float eps, scale, softcap, embed_scale, final_softcap;  // a cap of 0: none
    float output_scale;  // of what the head reads; 0: none
    const Layer* layer;
    Norm norm;
    Matrix embedding;
    Linear head;
    const float* positions;  // (places, width), or null
    Norm embed_norm;
    const float* distances;  // (heads, 2 reach + 1) added to scores of keys -reach to reach away, or null
    int64_t reach;           // keys further away have what those have
};

// Rows of cos and sin for one kind of rope: (n, dim) each, the first half of sin negated.
struct Rope {
    const float* cos;
    const float* sin;
    const int32_t* row;  // (tokens,) which row of the table each token turns by; null: its position
    int64_t dim, rows;
};

struct Embeds {
    int64_t offset, count;  // among the tokens of the work
    const float* values;    // (count, width), or (count, layers, width) of what is added
};

// What an adapter does to neighbouring panels of a linear map: with a weight w its outputs y become
// (1 + w gain) y + w scale (up x + shift), where x is what the map reads, or what `down` made of that.
struct Change {
    int64_t panel, panels;  // of the map: from which one on, and how many
    int64_t first;          // where x begins in what was made of it; -1: x is what the map reads
    int64_t stretch;        // the first row of what it changes, as turns and folds have it too
    Matrix up;              // (16 panels, size of x) floats; no rows: up x is x, or none where first is -1
    const float* gain;      // (panels, 16), or null
    const float* shift;     // (panels, 16), or null
    float scale;
    float pad;
};

// The linear maps of a layer that adapters change, and what these read.
enum ChangedMap : int64_t { kQkv, kOut, kGate, kUp, kDown, kChangedMaps, kUnchanged = -1 };
enum ReadOf : int64_t { kByQkv, kByOut, kByUp, kByDown, kReads };

inline ReadOf read_of(ChangedMap map) {
    return map == kQkv ? kByQkv : map == kOut ? kByOut : map == kDown ? kByDown : kByUp;
}

struct Changes {
    int64_t count;
    const Change* each;  // (count,), in the order in which they are made
};

// What rows of a map read in place of x, with a weight w: (1 + w (factors - 1)) x, or (1 - w) x + w x R
// with blocks of a rotation R on its diagonal. Changes of other adapters that stand inside read it too.
struct Turn {
    int64_t stretch, blocks, size;
    const float* factors;  // (size,), which is that of x, or null
    const float* blocks_of_turns;  // (blocks, size, size), or null
};

struct Turns {
    int64_t count;
    const Turn* each;
};

// Panels of a map in which a turn's rows lie: those that lanes above 0 say.
struct TurnedPanels {
    int64_t panel, panels, stretch;
    const float* lanes;  // (panels, 16)
};

struct TurnedMap {
    int64_t count;
    const TurnedPanels* each;
};

// What two small matrices make of x as one of (columns, inner columns): left (x right), to places
// [first, first + size) of what is made of it, zeros where there is no row.
struct Fold {
    int64_t stretch, first, size;
    int64_t rows, columns, inner_rows, inner_columns;
    const float* left;      // (rows, columns)
    const float* right;     // (inner columns, inner rows)
    const int64_t* places;  // (rows, inner rows)
};

struct Folds {
    int64_t count;
    const Fold* each;
};

struct LayerChanges {
    Matrix down[kReads];  // (ranks, size of what is read) floats; no rows: there is none
    Changes maps[kChangedMaps];
    Turns turns[kReads];
    TurnedMap turned[kChangedMaps];
    Folds folds[kReads];
};

struct Adapter {
    int64_t layers;
    int64_t most;        // values that are made of what is read, in whole panels
    int64_t most_down;   // those that a `down` makes
    int64_t most_turns;  // of what a layer reads at one place
    const LayerChanges* layer;
};

// Feeds one after another. A page holds 16 positions of a row, of all layers.
struct Work {
    int64_t tokens, feeds, ropes, embeds;
    const int64_t* ids;     // (tokens,), -1 where embeddings are given
    const int64_t* rows;    // (feeds,)
    const int64_t* starts;  // (feeds,)
    const int64_t* counts;  // (feeds,)
    const int64_t* wanted;  // (feeds,) of how many of the last positions to report logits
    const int32_t* pages;   // (all rows, stride)
    int64_t stride;
    const Rope* rope;
    const Embeds* embed;
    const int32_t* positions;  // (tokens,) whose embedding is added; null: of their place in a row
    const int64_t* best;    // (feeds,) how many of their best logits, or 0 for all
    int64_t most;           // the largest of `best`
    float* logits;          // (positions that report all, vocabulary)
    float* totals;          // (positions that report all,) logarithms of sums of exponentials, or null
    float* best_values;     // (positions that report the best, most), best first
    int64_t* best_tokens;   // likewise
    float* best_totals;     // (positions that report the best,), or null
    float* best_logits;     // (positions that report the best, vocabulary) all logits too, or null
    float* best_hidden;     // (positions that report the best, width) after the last norm, or null
    float* hidden;          // (tokens, width) after the last norm, or null
    int64_t early;          // how many layers' inputs are reported
    const int64_t* early_layers;  // (early,)
    float* early_hidden;    // (early, tokens, width) before those layers
    int64_t early_rows;     // how many of them the head reads
    const int64_t* early_places;  // (early_rows,) which
    float* early_logits;    // (early_rows, vocabulary) what the head alone makes of them
    // Null, or (feeds,): null, or where the weights of attention are reported, as (layers, heads, counts,
    // starts + counts) of the feed.
    float* const* attentions;
    // Which encoder states the feeds look at: lines of a table of pages, and how many positions these
    // have; null where layers look at none.
    const int64_t* across_rows;    // (feeds,)
    const int64_t* across_counts;  // (feeds,)
    const int32_t* across_pages;   // (all of them, across_stride)
    int64_t across_stride;
    float* const* across_attentions;  // as `attentions`, (layers, heads, counts, across_counts)
    // Where layers keep states: pages, each with those after one position of a row; null elsewhere.
    const int32_t* states_before;  // (feeds,) what a feed begins with, or -1
    const int64_t* states_kept;    // (feeds,) after how many of its last positions states are kept
    const int32_t* states_after;   // (sum of these,) where, feed by feed
    const int32_t* states_next;    // (feeds,) where those of the position after it will be kept
    int64_t copies;
    const int32_t* copy_from;  // (copies,) pages
    const int32_t* copy_to;
    int64_t deep;           // how many times something is added to hidden states
    int64_t deep_layers;    // after each of how many of the first layers
    const Embeds* added;    // (deep,)
    // What feeds ask of adapters: uses [use_begins[feed], use_begins[feed + 1]), in the order in which
    // their changes are made; null where none asks for any.
    int64_t adapters;
    const Adapter* adapter;       // (adapters,)
    const int64_t* use_begins;    // (feeds + 1,)
    const int64_t* use_adapters;  // (uses,) which one
    const float* use_weights;     // (uses,)
    // Whether threads may begin with what most likely comes next: every row has room for another
    // position in a page of its own, or for its states, and tables of ropes reach it and stay until
    // the next work.
    int64_t ahead;
};

}  // namespace everystep
