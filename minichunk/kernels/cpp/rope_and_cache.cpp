// Rotary embedding (and QK-norm) fused with the write into the KV cache: see `rope.py`.
//
// Compiled with -DHEAD_DIM.
#include <cmath>

#include "elements.h"

constexpr int HALF = HEAD_DIM / 2;

// Rotates one head by the angles of its position; with a weight, it is normalised first.
static inline void rotate(const Element* in, const float* cos, const float* sin,
                          const Element* weight, float eps, Element* out) {
    float head[HEAD_DIM];
    for (int i = 0; i < HEAD_DIM; ++i) head[i] = widen(in[i]);
    if (weight) {
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int i = 0; i < HEAD_DIM; ++i) squares += head[i] * head[i];
        const float inverse_rms = 1.0f / std::sqrt(squares / HEAD_DIM + eps);
        for (int i = 0; i < HEAD_DIM; ++i) head[i] *= inverse_rms * widen(weight[i]);
    }
#pragma omp simd
    for (int i = 0; i < HALF; ++i) {
        const float low = head[i], high = head[HALF + i];
        out[i] = narrow(low * cos[i] - high * sin[i]);
        out[HALF + i] = narrow(high * cos[i] + low * sin[i]);
    }
}

// q [tokens, q_heads, HEAD_DIM], k, v [tokens, kv_heads, HEAD_DIM], each token contiguous;
// cos, sin [tokens, HALF]; slots [tokens], -1 writes nothing; q_norm, k_norm [HEAD_DIM] or null;
// q_out like q; k_cache, v_cache [slots, kv_heads, HEAD_DIM].
extern "C" void rope_and_cache(const Element* q, int64_t q_stride, const Element* k,
                               int64_t k_stride, const Element* v, int64_t v_stride,
                               const float* cos, const float* sin, const int64_t* slots,
                               const Element* q_norm, const Element* k_norm, float eps,
                               int64_t tokens, int64_t q_heads, int64_t kv_heads, Element* q_out,
                               Element* k_cache, Element* v_cache) {
    const int64_t size = kv_heads * HEAD_DIM;
#pragma omp parallel for if (tokens * (q_heads + 2 * kv_heads) * HEAD_DIM >= WORTH_SHARING)
    for (int64_t token = 0; token < tokens; ++token) {
        const float *c = cos + token * HALF, *s = sin + token * HALF;
        for (int64_t head = 0; head < q_heads; ++head)
            rotate(q + token * q_stride + head * HEAD_DIM, c, s, q_norm, eps,
                   q_out + (token * q_heads + head) * HEAD_DIM);
        if (slots[token] < 0) continue;
        for (int64_t head = 0; head < kv_heads; ++head)
            rotate(k + token * k_stride + head * HEAD_DIM, c, s, k_norm, eps,
                   k_cache + slots[token] * size + head * HEAD_DIM);
        memcpy(v_cache + slots[token] * size, v + token * v_stride, size * sizeof(Element));
    }
}
