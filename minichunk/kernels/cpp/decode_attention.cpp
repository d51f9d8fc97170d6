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

// 16 floats that are computed with at once; on a CPU with shorter registers, in several of them.
constexpr int LANES = 16;
typedef float Vector __attribute__((vector_size(LANES * sizeof(float))));
typedef int Lanes __attribute__((vector_size(LANES * sizeof(int))));
constexpr int PARTS = (HEAD_DIM + LANES - 1) / LANES;  // of a head; the last is filled up with zeros

struct Head {
    Vector parts[PARTS];
};

static inline Head load(const Element* x) {
    float floats[PARTS * LANES] = {};
    for (int i = 0; i < HEAD_DIM; ++i) floats[i] = widen(x[i]);
    Head head;
    memcpy(&head, floats, sizeof head);
    return head;
}

// The sums of neighbouring lanes: first those of a, then those of b.
static inline Vector fold(Vector a, Vector b) {
    const Lanes even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
}

// Lane i of the result is the sum of all lanes of v[i]: 16 sums in the time of a few.
static inline Vector sums(Vector* v) {
    for (int n = LANES; n > 1; n /= 2)
        for (int i = 0; i < n / 2; ++i) v[i] = fold(v[2 * i], v[2 * i + 1]);
    return v[0];
}

// What a split found: for each query head the largest score, the sum of exp(score - largest), and
// the values weighted by these.
struct Partial {
    float largest[HEADS];
    float sum[HEADS];
    float values[HEADS][HEAD_DIM];
};

// Where the tokens first .. last - 1 of a sequence lie in the caches. All KV heads of a token are
// neighbours, so one thread reads them all, in one stream.
struct Places {
    int64_t count;
    int64_t offset[SPLIT + 2 * LANES];  // beyond the last token, its own again

    Places(const int32_t* table, int64_t block_size, int64_t first, int64_t last)
        : count(last - first) {
        for (int64_t token = first; token < last; ++token)
            offset[token - first] = slot_of(table, block_size, token) * ROW;
        for (int64_t t = count; t < count + 2 * LANES; ++t) offset[t] = offset[count - 1];
    }

    // The hardware foresees where a stream goes on, but not to which block it jumps.
    const Element* row(const Element* cache, int64_t t) const {
        for (int i = 0; i < ROW; i += CACHE_LINE) __builtin_prefetch(cache + offset[t + LANES] + i);
        return cache + offset[t];
    }
};

static void attend(const Element* q, float scale, const Element* k_cache, const Element* v_cache,
                   const Places& places, Partial& found) {
    Head queries[HEADS];
    for (int h = 0; h < HEADS; ++h) queries[h] = load(q + h * HEAD_DIM);

    float scores[HEADS][SPLIT + LANES];
    for (int64_t t = 0; t < places.count; t += LANES) {
        const Element* rows[LANES];
        for (int i = 0; i < LANES; ++i) rows[i] = places.row(k_cache, t + i);
        for (int h = 0; h < HEADS; h += GROUP) {
            Vector dots[GROUP][LANES] = {};
            for (int i = 0; i < LANES; ++i) {
                const Head key = load(rows[i] + h / GROUP * HEAD_DIM);
                for (int g = 0; g < GROUP; ++g)
                    for (int part = 0; part < PARTS; ++part)
                        dots[g][i] += queries[h + g].parts[part] * key.parts[part];
            }
            for (int g = 0; g < GROUP; ++g) {
                const Vector tokens = sums(dots[g]) * scale;
                memcpy(&scores[h + g][t], &tokens, sizeof tokens);
            }
        }
    }

    for (int h = 0; h < HEADS; ++h) {
        float largest = scores[h][0], sum = 0;
#pragma omp simd reduction(max : largest)
        for (int64_t t = 0; t < places.count; ++t)
            largest = scores[h][t] > largest ? scores[h][t] : largest;
#pragma omp simd reduction(+ : sum)
        for (int64_t t = 0; t < places.count; ++t) {
            scores[h][t] = exponential(scores[h][t] - largest);
            sum += scores[h][t];
        }
        found.largest[h] = largest;
        found.sum[h] = sum;
    }

    memset(found.values, 0, sizeof found.values);
    for (int64_t t = 0; t < places.count; ++t) {
        const Element* row = places.row(v_cache, t);
        for (int h = 0; h < HEADS; ++h) {
            const Element* value = row + h / GROUP * HEAD_DIM;
            for (int i = 0; i < HEAD_DIM; ++i) found.values[h][i] += scores[h][t] * widen(value[i]);
        }
    }
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
            attend(q + rows[d] * q_stride, scale, k_cache, v_cache,
                   Places(table, block_size, first, last), partials[split]);
        }
#pragma omp for
        for (int64_t d = 0; d < num_decodes; ++d)
            merge(partials + first_split[d], first_split[d + 1] - first_split[d],
                  out + rows[d] * HEADS * HEAD_DIM);
    }
}
