// Attention of decode tokens over the paged cache: see `attention_cpp.py`.
//
// Compiled with -DHEAD_DIM, -DKV_HEADS, -DGROUP (the query heads that share a KV head) and -DSPLIT,
// the tokens of a sequence that one thread attends to at a time. A compiler that knows the shapes
// keeps sums in registers.
#include <cmath>

#include "elements.h"

constexpr int HEADS = KV_HEADS * GROUP;
constexpr int ROW = KV_HEADS * HEAD_DIM;  // elements of a token in the cache
constexpr int CACHE_LINE = 64 / sizeof(Element);

// What a split found: for each query head the largest score, the sum of exp(score - largest), and
// the values weighted by these.
struct Partial {
    float largest[HEADS];
    float sum[HEADS];
    float values[HEADS][HEAD_DIM];
};

// The tokens first .. last - 1 of a sequence, in the cache of keys or of values.
struct Rows {
    const Element* cache;
    const int32_t* table;
    int64_t block_size, first, last;

    // Calls visit(index, row) for each, block by block, as they lie in memory: all KV heads of a
    // token are neighbours, so one thread reads them all, in one stream. The hardware foresees where
    // that stream goes on, but not to which block it jumps: so the next block is called for ahead.
    template <typename Visit>
    void for_each(Visit visit) const {
        for (int64_t token = first, stop; token < last;) {
            const int64_t block = token / block_size, end = (block + 1) * block_size;
            const Element* row = at(block) + (token - block * block_size) * ROW;
            const Element* next = at(end < last ? block + 1 : block);
            for (stop = end < last ? end : last; token < stop; ++token, row += ROW, next += ROW) {
                for (int i = 0; i < ROW; i += CACHE_LINE) __builtin_prefetch(next + i);
                visit(token - first, row);
            }
        }
    }

    const Element* at(int64_t block) const { return cache + table[block] * block_size * ROW; }
};

static void attend(const Element* q, float scale, const Rows& keys, const Rows& values,
                   Partial& found) {
    float query[HEADS][HEAD_DIM], scores[HEADS][SPLIT];
    for (int h = 0; h < HEADS; ++h)
        for (int i = 0; i < HEAD_DIM; ++i) query[h][i] = widen(q[h * HEAD_DIM + i]) * scale;

    keys.for_each([&](int64_t token, const Element* row) {
        for (int kv = 0; kv < KV_HEADS; ++kv) {
            float key[HEAD_DIM];
            for (int i = 0; i < HEAD_DIM; ++i) key[i] = widen(row[kv * HEAD_DIM + i]);
            for (int h = kv * GROUP; h < (kv + 1) * GROUP; ++h) {
                float score = 0;
#pragma omp simd reduction(+ : score)
                for (int i = 0; i < HEAD_DIM; ++i) score += query[h][i] * key[i];
                scores[h][token] = score;
            }
        }
    });

    const int64_t count = keys.last - keys.first;
    for (int h = 0; h < HEADS; ++h) {
        float largest = scores[h][0], sum = 0;
#pragma omp simd reduction(max : largest)
        for (int64_t t = 0; t < count; ++t) largest = scores[h][t] > largest ? scores[h][t] : largest;
#pragma omp simd reduction(+ : sum)
        for (int64_t t = 0; t < count; ++t) {
            scores[h][t] = exponential(scores[h][t] - largest);
            sum += scores[h][t];
        }
        found.largest[h] = largest;
        found.sum[h] = sum;
    }

    memset(found.values, 0, sizeof found.values);
    values.for_each([&](int64_t token, const Element* row) {
        for (int kv = 0; kv < KV_HEADS; ++kv) {
            float value[HEAD_DIM];
            for (int i = 0; i < HEAD_DIM; ++i) value[i] = widen(row[kv * HEAD_DIM + i]);
            for (int h = kv * GROUP; h < (kv + 1) * GROUP; ++h)
                for (int i = 0; i < HEAD_DIM; ++i)
                    found.values[h][i] += scores[h][token] * value[i];
        }
    });
}

// Joins the splits of a sequence: each is weighted by exp(its largest score - the largest of all).
static void merge(const Partial* found, int64_t num_splits, Element* out) {
    for (int h = 0; h < HEADS; ++h) {
        float largest = found[0].largest[h];
        for (int64_t s = 1; s < num_splits; ++s) largest = std::fmax(largest, found[s].largest[h]);
        float sum = 0, total[HEAD_DIM] = {};
        for (int64_t s = 0; s < num_splits; ++s) {
            const float weight = std::exp(found[s].largest[h] - largest);
            sum += weight * found[s].sum[h];
            for (int i = 0; i < HEAD_DIM; ++i) total[i] += weight * found[s].values[h][i];
        }
        for (int i = 0; i < HEAD_DIM; ++i) out[h * HEAD_DIM + i] = narrow(total[i] / sum);
    }
}

// q [tokens, HEADS, HEAD_DIM] and out, each token contiguous; k_cache, v_cache [blocks, block_size,
// KV_HEADS, HEAD_DIM]; block_tables [sequences, table_width]; lengths [sequences].
// Decode d is row rows[d] of q and out, and sequence sequences[d] of tables and lengths. Its splits
// are first_split[d] .. first_split[d + 1] - 1 of `partials`, and owner[split] says d.
extern "C" void decode_attention(const Element* q, int64_t q_stride, const Element* k_cache,
                               const Element* v_cache, int64_t block_size,
                               const int32_t* block_tables, int64_t table_width,
                               const int32_t* lengths, const int64_t* rows,
                               const int64_t* sequences, const int64_t* first_split,
                               const int64_t* owner, int64_t num_decodes, float scale,
                               Partial* partials, Element* out) {
#pragma omp parallel
    {
#pragma omp for schedule(dynamic)
        for (int64_t split = 0; split < first_split[num_decodes]; ++split) {
            const int64_t d = owner[split];
            const int64_t first = (split - first_split[d]) * SPLIT;
            const int64_t length = lengths[sequences[d]];
            const int64_t last = first + SPLIT < length ? first + SPLIT : length;
            const int32_t* table = block_tables + sequences[d] * table_width;
            attend(q + rows[d] * q_stride, scale, Rows{k_cache, table, block_size, first, last},
                   Rows{v_cache, table, block_size, first, last}, partials[split]);
        }
#pragma omp for
        for (int64_t d = 0; d < num_decodes; ++d)
            merge(partials + first_split[d], first_split[d + 1] - first_split[d],
                  out + rows[d] * HEADS * HEAD_DIM);
    }
}
