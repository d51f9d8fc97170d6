// What the kernels share: the element type, its conversion to float and back, exp, and where a token
// lies in the paged cache.
//
// Compiled with -DELEMENT_IS_FLOAT for float32; bfloat16 otherwise, which is the upper half of a
// float. All arithmetic is done in float. The loops are written so that a compiler can vectorise
// them (`omp simd`); there are no intrinsics, so they run on any CPU.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef ELEMENT_IS_FLOAT
using Element = float;
inline float widen(float x) { return x; }
inline float narrow(float x) { return x; }
#else
using Element = uint16_t;

inline float widen(Element bits) {
    uint32_t wide = uint32_t(bits) << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

// Rounds to the nearest, ties to even, as torch does.
inline Element narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
    return is_nan ? 0x7fc0 : uint16_t(rounded >> 16);
}
#endif

// e to the x, to a few units in the last place: 2 to the whole part of x / ln 2, times a polynomial.
// 0 below -87.7 and infinite above 88.4: at the bounds the exponent's bits are all 0 or all 1.
inline float exponential(float x) {
    x = x < -88.0f ? -88.0f : x > 89.0f ? 89.0f : x;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    float shifted = x * 1.44269504f + shift;
    float whole = shifted - shift;
    float rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;  // ln 2 in two parts
    float power = 1.9875691500e-4f;
    power = power * rest + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    uint32_t exponent;
    memcpy(&exponent, &shifted, sizeof exponent);
    exponent = (exponent + 127) << 23;  // the low bits of `shifted` are the integer
    float scale;
    memcpy(&scale, &exponent, sizeof scale);
    return power * scale;
}

// Where a token of a sequence lies in a paged cache, counted in tokens.
inline int64_t slot_of(const int32_t* block_table, int64_t block_size, int64_t token) {
    return block_table[token / block_size] * block_size + token % block_size;
}

// Below this many elements, waking the other threads costs more than they save.
constexpr int64_t WORTH_SHARING = 1 << 15;
