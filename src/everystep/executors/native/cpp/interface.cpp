// What the library is to its users: plain functions on plain data, out of which nothing is thrown.
#include <algorithm>
#include <new>
#include <stdexcept>
#include <system_error>

#include "step.h"

using namespace everystep;

namespace {

// What went wrong, as `library.py` counts it.
enum Failure : int32_t { kNone, kMemory, kUnknownId, kUnfitMatrices, kThreads, kInvalid };

template <class Action>
int32_t failure_of(Action action) noexcept {
    try {
        action();
        return kNone;
    } catch (const std::bad_alloc&) {
        return kMemory;
    } catch (const std::length_error&) {
        return kMemory;
    } catch (const std::out_of_range&) {
        return kUnknownId;
    } catch (const std::invalid_argument&) {
        return kUnfitMatrices;
    } catch (const std::system_error&) {
        return kThreads;
    } catch (...) {
        return kInvalid;
    }
}

Runner& of(void* runner) { return *static_cast<Runner*>(runner); }

}  // namespace

extern "C" {

int32_t es_interface() { return 22; }

// Sizes of the structures, so that their mirror in Python can be checked.
void es_sizes(int64_t* out) {
    out[0] = sizeof(Matrix);
    out[1] = sizeof(Linear);
    out[2] = sizeof(Mlp);
    out[3] = sizeof(Experts);
    out[4] = sizeof(Recurrence);
    out[5] = sizeof(Layer);
    out[6] = sizeof(Model);
    out[7] = sizeof(Rope);
    out[8] = sizeof(Embeds);
    out[9] = sizeof(Change);
    out[10] = sizeof(LayerChanges);
    out[11] = sizeof(Turn);
    out[12] = sizeof(TurnedPanels);
    out[13] = sizeof(Fold);
    out[14] = sizeof(Adapter);
    out[15] = sizeof(Work);
}

// Every function that returns a number returns a Failure. `kv_type`: a KvType.
int32_t es_open(const Model* model, int32_t kv_type, void** runner) {
    return failure_of([&] { *runner = new Runner(*model, static_cast<KvType>(kv_type)); });
}

void es_close(void* runner) { delete static_cast<Runner*>(runner); }

// `across`: pages of encoder states.
int32_t es_reserve(void* runner, int64_t pages, int64_t across) {
    return failure_of([&] { of(runner).reserve(pages, across); });
}

// The given pages hold what layers make of (count, width) encoder states.
int32_t es_keep_states(void* runner, const float* states, int64_t count, const int32_t* pages,
                       int32_t threads) {
    return failure_of([&] { of(runner).keep_states(states, count, pages, threads); });
}

// What a row with the given pages holds, as (layers, 2, kv_heads, length, head_dim). `across`: what is
// made of encoder states.
void es_export(void* runner, const int32_t* pages, int64_t length, int32_t across, float* out) {
    of(runner).give_up_ahead();
    of(runner).each_cached(
        pages, length, across, [&](const Keys& keys, int64_t position, int64_t key, int64_t value) {
            read_position(keys, position, out + key, out + value);
        });
}

// The opposite: fills the pages of a row.
void es_import(void* runner, const int32_t* pages, int64_t length, const float* values) {
    of(runner).give_up_ahead();
    of(runner).each_cached(
        pages, length, false, [&](const Keys& keys, int64_t position, int64_t key, int64_t value) {
            write_position(keys, position, values + key, values + value);
        });
}

// The states in a page, as (layers, kernel - 1 + states, inner): the last inputs of the convolution, the
// oldest first, then the states of the scan.
void es_export_states(void* runner, int32_t page, float* out) {
    of(runner).give_up_ahead();
    std::copy_n(of(runner).states_in(page), of(runner).all_states(), out);
}

// The opposite.
void es_import_states(void* runner, int32_t page, const float* values) {
    of(runner).give_up_ahead();
    std::copy_n(values, of(runner).all_states(), of(runner).states_in(page));
}

// Nothing is computed until the next es_run.
void es_rest(void* runner) { of(runner).give_up_ahead(); }

// How many steps were begun before they were asked for, and how many of those were asked for.
void es_guesses(void* runner, int64_t* out) {
    out[0] = of(runner).guess().made();
    out[1] = of(runner).guess().true_ones();
}

// How many experts were read in all works.
int64_t es_experts_read(void* runner) { return of(runner).experts_read(); }

// Writes the values of rows [first, last) of a packed matrix, (last - first, columns).
void es_read_rows(const Matrix* matrix, int64_t first, int64_t last, float* out) {
    read_rows(*matrix, first, last, out);
}

// Writes what a row of scores comes to, four numbers; see `sum_up`.
void es_sum_up(const float* scores, int64_t size, double* out) { sum_up(scores, size, out); }

// Writes (rows, vocabulary) logits of (rows, width) hidden states after the last norm. What was begun
// ahead goes on.
int32_t es_read_out(void* runner, const float* hidden, int64_t rows, float* logits) {
    return failure_of([&] { of(runner).read_out(hidden, rows, logits); });
}

int32_t es_run(void* runner, const Work* work, int32_t threads) {
    return failure_of([&] { of(runner).run(*work, threads); });
}
}
