// What the library is to its users: plain functions on plain data.
#include <new>
#include <stdexcept>

#include "step.h"

using namespace everystep;

extern "C" {

int32_t es_interface() { return 8; }

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

// `kv_type`: a KvType. 0, 1 without the memory for it, or 3 where matrices are joined within panels.
int32_t es_open(const Model* model, int32_t kv_type, void** runner) {
    try {
        *runner = new Runner(*model, static_cast<KvType>(kv_type));
        return 0;
    } catch (const std::invalid_argument&) {
        return 3;
    } catch (const std::exception&) {
        return 1;
    }
}

void es_close(void* runner) { delete static_cast<Runner*>(runner); }

// 0, or 1 without the memory for it.
int32_t es_reserve(void* runner, int64_t pages) {
    try {
        static_cast<Runner*>(runner)->reserve(pages);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

// What a row with the given pages holds, as (layers, 2, kv_heads, length, head_dim).
void es_export(void* runner, const int32_t* pages, int64_t length, float* out) {
    static_cast<Runner*>(runner)->give_up_ahead();
    static_cast<Runner*>(runner)->each_cached(
        pages, length, [&](const Keys& keys, int64_t position, int64_t key, int64_t value) {
            read_position(keys, position, out + key, out + value);
        });
}

// The opposite: fills the pages of a row.
void es_import(void* runner, const int32_t* pages, int64_t length, const float* values) {
    static_cast<Runner*>(runner)->give_up_ahead();
    static_cast<Runner*>(runner)->each_cached(
        pages, length, [&](const Keys& keys, int64_t position, int64_t key, int64_t value) {
            write_position(keys, position, values + key, values + value);
        });
}

// Nothing is computed until the next es_run.
void es_rest(void* runner) { static_cast<Runner*>(runner)->give_up_ahead(); }

// How many steps were begun before they were asked for, and how many of those were asked for.
void es_guesses(void* runner, int64_t* out) {
    out[0] = static_cast<Runner*>(runner)->guess().made();
    out[1] = static_cast<Runner*>(runner)->guess().true_ones();
}

// Writes (rows, vocabulary) logits of (rows, width) hidden states after the last norm. 0, or 1 without
// the memory for it. What was begun ahead goes on.
int32_t es_read_out(const void* runner, const float* hidden, int64_t rows, float* logits) {
    try {
        static_cast<const Runner*>(runner)->read_out(hidden, rows, logits);
        return 0;
    } catch (const std::exception&) {
        return 1;
    }
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
