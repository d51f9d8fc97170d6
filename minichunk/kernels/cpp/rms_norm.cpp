// RMS norm with the residual addition, one row at a time: see `rms_norm.py`.
#include <cmath>

#include "elements.h"

// x, residual, out, sum [rows, width]; weight [width]. residual may be null; then sum is not written.
extern "C" void rms_norm(const Element* x, int64_t x_stride, const Element* residual,
                         int64_t residual_stride, const Element* weight, float eps, int64_t rows,
                         int64_t width, Element* out, Element* sum) {
#pragma omp parallel for if (rows * width >= WORTH_SHARING)
    for (int64_t row = 0; row < rows; ++row) {
        const Element* in = x + row * x_stride;
        if (residual) {
            const Element* other = residual + row * residual_stride;
            Element* total = sum + row * width;
#pragma omp simd
            for (int64_t i = 0; i < width; ++i) total[i] = narrow(widen(in[i]) + widen(other[i]));
            in = total;
        }
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (int64_t i = 0; i < width; ++i) squares += widen(in[i]) * widen(in[i]);
        const float inverse_rms = 1.0f / std::sqrt(squares / float(width) + eps);
        Element* normed = out + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i)
            normed[i] = narrow(widen(in[i]) * inverse_rms * widen(weight[i]));
    }
}
