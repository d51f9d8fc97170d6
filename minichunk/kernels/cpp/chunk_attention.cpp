// Attention of a prompt's chunk over the paged cache: see `attention_cpp.py`.
//
// FlashAttention (Dao et al., 2022): tiles of queries meet tiles of keys, and the scores of a tile
// never leave the cache nearest to the core. The products are torch's own small ones ("brgemm"),
// which use the processor's matrix unit (AMX) where there is one.
// Compiled with -DHEAD_DIM, -DKV_HEADS, -DGROUP and -DKEYS, the keys of a tile; for bfloat16 only.
#include <cmath>
#include <memory>

#include "elements.h"

namespace c10 {
struct BFloat16;
}
namespace at::native::cpublas {
void brgemm(long m, long n, long inner, long a_stride, long b_stride, long c_stride, bool add,
            const c10::BFloat16* a, const c10::BFloat16* b, float* c, bool b_is_in_pairs);
void brgemm_release(bool b_is_in_pairs);
}  // namespace at::native::cpublas

constexpr int HEADS = KV_HEADS * GROUP;
constexpr int TOKENS = GROUP <= 4 ? 32 : 16;  // of a tile, each with a row for each of its heads
constexpr int ROWS = TOKENS * GROUP;
constexpr int UNIT = 16;  // rows that the matrix unit takes at once
static_assert(HEAD_DIM % 2 == 0 && KEYS % 2 == 0, "the products take pairs of rows");

// c (+)= a b for a [m, inner], b in pairs of rows, c [m, n].
static void product(int m, int n, int inner, const Element* a, const Element* b, float* c,
                    bool add) {
    at::native::cpublas::brgemm(m, n, inner, inner, n, n, add,
                                reinterpret_cast<const c10::BFloat16*>(a),
                                reinterpret_cast<const c10::BFloat16*>(b), c, true);
}

// One tile of keys and values of one KV head, as the products want them: keys transposed, and both
// with pairs of rows side by side. Keys beyond `count` are zeros.
struct Tile {
    Element keys[HEAD_DIM / 2][KEYS][2];
    Element values[KEYS / 2][HEAD_DIM][2];
};

static void pack(const Element* k_cache, const Element* v_cache, const int32_t* table,
                 int64_t block_size, int64_t first, int64_t count, int64_t head, Tile& tile) {
    if (count < KEYS) memset(&tile, 0, sizeof tile);
    for (int64_t key = 0; key < count; ++key) {
        const int64_t place = (slot_of(table, block_size, first + key) * KV_HEADS + head) * HEAD_DIM;
        for (int i = 0; i < HEAD_DIM / 2; ++i)
            memcpy(tile.keys[i][key], k_cache + place + 2 * i, 2 * sizeof(Element));
        for (int i = 0; i < HEAD_DIM; ++i) tile.values[key / 2][i][key % 2] = v_cache[place + i];
    }
}

// The running softmax of a tile of queries: largest score, sum of exponentials, weighted values.
struct Running {
    float largest[ROWS];
    float sum[ROWS];
    float values[ROWS][HEAD_DIM];
};

constexpr float LOG2_E = 1.44269504f;

// 2 to the y for y <= 0, to 3e-6: more than bfloat16 keeps. 0 below -126.5.
static inline float power_of_2(float y) {
    y = y < -127.0f ? -127.0f : y;
    const float shift = 12582912.0f + 127.0f;  // adding 1.5 * 2^23 rounds to an integer
    const float shifted = y + shift;
    const float rest = y - (shifted - shift);
    float power = 9.5828532e-3f;
    power = power * rest + 5.5906425e-2f;
    power = power * rest + 2.4024099e-1f;
    power = power * rest + 6.9312419e-1f;
    power = power * rest + 1.0f;
    uint32_t exponent;
    memcpy(&exponent, &shifted, sizeof exponent);
    exponent <<= 23;  // the low bits of `shifted` are the integer, plus the exponent's bias of 127
    float scale;
    memcpy(&scale, &exponent, sizeof scale);
    return power * scale;
}

// Turns the scores of one row into weights, 2 to the (scaled score - the largest so far); `visible`
// of them count.
static void weigh(const float* scores, int64_t visible, float scale, Running& running, int row,
                  Element* weights) {
    float largest = running.largest[row];
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < visible; ++i) largest = scores[i] > largest ? scores[i] : largest;
    if (largest > running.largest[row]) {  // what was summed up relates to a smaller one
        const float shrink = std::exp2((running.largest[row] - largest) * scale);
        running.largest[row] = largest;
        running.sum[row] *= shrink;
        for (int i = 0; i < HEAD_DIM; ++i) running.values[row][i] *= shrink;
    }
    // Subtracted before scaling, so that the largest score has the weight 1 however large it is;
    // where all are -inf so far, none of them counts.
    const float base = largest == -INFINITY ? 0.0f : largest;
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < visible; ++i) {
        const float weight = power_of_2((scores[i] - base) * scale);
        sum += weight;
        uint32_t bits;
        memcpy(&bits, &weight, sizeof bits);
        weights[i] = Element((bits + 0x8000) >> 16);
    }
    running.sum[row] += sum;
    for (int64_t i = visible; i < KEYS; ++i) weights[i] = 0;
}

// The queries of one tile and KV head against all keys up to their own; `position` is the first's.
static void attend(const Element* q, int64_t q_stride, int64_t tokens, int64_t position,
                   int64_t head, const Tile* tiles, float scale, Element* out) {
    alignas(64) Element queries[ROWS][HEAD_DIM] = {}, weights[ROWS][KEYS] = {};
    alignas(64) float scores[ROWS][KEYS];
    alignas(64) Running running;
    static_assert(sizeof queries + sizeof weights + sizeof scores + sizeof running <= 1 << 20,
                  "a thread's stack may have no more than 2 MB");
    const int rows = int(tokens) * GROUP, computed = (rows + UNIT - 1) / UNIT * UNIT;
    for (int64_t token = 0; token < tokens; ++token)
        memcpy(queries[token * GROUP], q + token * q_stride + head * GROUP * HEAD_DIM,
               GROUP * HEAD_DIM * sizeof(Element));
    for (int row = 0; row < ROWS; ++row) {
        running.largest[row] = -INFINITY;
        running.sum[row] = 0;
    }
    memset(running.values, 0, sizeof running.values);

    for (int64_t first = 0; first < position + tokens; first += KEYS) {
        const Tile& tile = tiles[first / KEYS];
        product(computed, KEYS, HEAD_DIM, queries[0], tile.keys[0][0], scores[0], false);
        for (int row = 0; row < rows; ++row) {
            const int64_t seen = position + row / GROUP + 1 - first;
            if (seen > 0)
                weigh(scores[row], seen < KEYS ? seen : KEYS, scale, running, row, weights[row]);
            else
                memset(weights[row], 0, sizeof weights[row]);
        }
        product(computed, HEAD_DIM, KEYS, weights[0], tile.values[0][0], running.values[0], true);
    }
    for (int row = 0; row < rows; ++row) {
        Element* target = out + (row / GROUP * HEADS + head * GROUP + row % GROUP) * HEAD_DIM;
        for (int i = 0; i < HEAD_DIM; ++i)
            target[i] = narrow(running.values[row][i] / running.sum[row]);
    }
}

// q [tokens, HEADS, HEAD_DIM], each token contiguous, and out alike: the rows of one chunk, which
// are the last tokens of a sequence of num_keys. k_cache, v_cache [blocks, block_size, KV_HEADS,
// HEAD_DIM]; table: the sequence's blocks; tiles: KV_HEADS for each KEYS keys, to be filled.
extern "C" void chunk_attention(const Element* q, int64_t q_stride, int64_t tokens,
                                const Element* k_cache, const Element* v_cache, int64_t block_size,
                                const int32_t* table, int64_t num_keys, float scale, Tile* tiles,
                                Element* out) {
    const int64_t prefix = num_keys - tokens, num_tiles = (num_keys + KEYS - 1) / KEYS;
#pragma omp parallel
    {
#pragma omp for collapse(2)
        for (int64_t tile = 0; tile < num_tiles; ++tile)
            for (int64_t head = 0; head < KV_HEADS; ++head) {
                const int64_t first = tile * KEYS, left = num_keys - first;
                pack(k_cache, v_cache, table, block_size, first, left < KEYS ? left : KEYS, head,
                     tiles[head * num_tiles + tile]);
            }
#pragma omp for collapse(2) schedule(dynamic)
        for (int64_t first = 0; first < tokens; first += TOKENS)
            for (int64_t head = 0; head < KV_HEADS; ++head) {
                const int64_t left = tokens - first;
                attend(q + first * q_stride, q_stride, left < TOKENS ? left : TOKENS,
                       prefix + first, head, tiles + head * num_tiles, scale * LOG2_E,
                       out + first * HEADS * HEAD_DIM);
            }
        at::native::cpublas::brgemm_release(true);
    }
}

// Whether torch's products work here, 1 or 0: they throw where its oneDNN is switched off, or kept
// from using this processor's instructions (ONEDNN_MAX_CPU_ISA). In `chunk_attention`, whose threads
// cannot pass exceptions on, that would end the process.
extern "C" int has_products() {
    try {
        const auto tile = std::make_unique<Tile>();
        Element token[HEADS * HEAD_DIM] = {}, out[HEADS * HEAD_DIM];
        attend(token, 0, 1, 0, 0, tile.get(), 1.0f, out);
        at::native::cpublas::brgemm_release(true);
    } catch (...) {
        return 0;
    }
    return 1;
}
