// Serves the native library to another process, over standard input and output: memory is written
// and read, and functions are called, as told. Numbers are little-endian, as on both processors.
//
//     W address size bytes...        writes memory
//     R address size                 answers with its bytes
//     C name(16) arguments(5 x 8)    answers with the result as 8 bytes
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

#include "pack.h"

extern "C" {
int32_t es_interface();
void es_sizes(int64_t*);
int32_t es_open(const everystep::Model*, int32_t, void**);
void es_close(void*);
int32_t es_reserve(void*, int64_t, int64_t);
int32_t es_keep_states(void*, const float*, int64_t, const int32_t*, int32_t);
void es_export(void*, const int32_t*, int64_t, int32_t, float*);
void es_import(void*, const int32_t*, int64_t, const float*);
void es_export_states(void*, int32_t, float*);
void es_import_states(void*, int32_t, const float*);
int32_t es_run(void*, const everystep::Work*, int32_t);
}

namespace {

// Begins where a line of the cache does, as the caller's own memory may.
void* take(int64_t bytes) { return std::aligned_alloc(64, (bytes + 63) / 64 * 64); }
void give_back(void* room) { std::free(room); }

int64_t matrix_bytes(int32_t format, int64_t rows, int64_t columns) {
    using namespace everystep;
    return panels_of(rows) * panel_bytes(static_cast<Format>(format), columns);
}

template <class To>
To as(int64_t value) {
    if constexpr (std::is_pointer_v<To>)
        return reinterpret_cast<To>(value);
    else
        return static_cast<To>(value);
}

template <class Result, class... Given, std::size_t... I>
int64_t call(Result (*function)(Given...), const int64_t* given, std::index_sequence<I...>) {
    (void)given;
    if constexpr (std::is_void_v<Result>) {
        function(as<Given>(given[I])...);
        return 0;
    } else {
        return (int64_t)function(as<Given>(given[I])...);
    }
}

template <class Result, class... Given>
int64_t call(Result (*function)(Given...), const int64_t* given) {
    return call(function, given, std::index_sequence_for<Given...>());
}

struct Function {
    const char* name;
    int64_t (*call)(const int64_t*);
};

const Function kFunctions[] = {
    {"take", [](const int64_t* given) { return call(take, given); }},
    {"give_back", [](const int64_t* given) { return call(give_back, given); }},
    {"matrix_bytes", [](const int64_t* given) { return call(matrix_bytes, given); }},
    {"es_interface", [](const int64_t* given) { return call(es_interface, given); }},
    {"es_sizes", [](const int64_t* given) { return call(es_sizes, given); }},
    {"es_open", [](const int64_t* given) { return call(es_open, given); }},
    {"es_close", [](const int64_t* given) { return call(es_close, given); }},
    {"es_reserve", [](const int64_t* given) { return call(es_reserve, given); }},
    {"es_keep_states", [](const int64_t* given) { return call(es_keep_states, given); }},
    {"es_export", [](const int64_t* given) { return call(es_export, given); }},
    {"es_import", [](const int64_t* given) { return call(es_import, given); }},
    {"es_export_states", [](const int64_t* given) { return call(es_export_states, given); }},
    {"es_import_states", [](const int64_t* given) { return call(es_import_states, given); }},
    {"es_run", [](const int64_t* given) { return call(es_run, given); }},
};

void receive(void* to, std::size_t size) {
    if (std::fread(to, 1, size, stdin) != size) std::exit(0);  // the other side is gone
}

void serve_call() {
    char name[16];
    int64_t given[5];
    receive(name, sizeof name);
    receive(given, sizeof given);
    for (const Function& function : kFunctions) {
        if (std::strncmp(function.name, name, sizeof name) != 0) continue;
        const int64_t result = function.call(given);
        std::fwrite(&result, sizeof result, 1, stdout);
        return;
    }
    std::fprintf(stderr, "no function %.16s\n", name);
    std::exit(1);
}

void serve_memory(bool write) {
    int64_t place[2];
    receive(place, sizeof place);
    void* room = as<void*>(place[0]);
    if (write)
        receive(room, place[1]);
    else
        std::fwrite(room, 1, place[1], stdout);
}

}  // namespace

int main() {
    for (;;) {
        char what;
        receive(&what, 1);
        if (what == 'C')
            serve_call();
        else
            serve_memory(what == 'W');
        std::fflush(stdout);
    }
}
