// silu(gate) * up: see `swiglu.py`.
#include "elements.h"

// gate_up [rows, 2 * width], gate first; out [rows, width].
extern "C" void swiglu(const Element* gate_up, int64_t stride, int64_t rows, int64_t width,
                       Element* out) {
#pragma omp parallel for if (rows * width >= WORTH_SHARING)
    for (int64_t row = 0; row < rows; ++row) {
        const Element* gate = gate_up + row * stride;
        const Element* up = gate + width;
        Element* activated = out + row * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            const float x = widen(gate[i]);
            activated[i] = narrow(x / (1.0f + exponential(-x)) * widen(up[i]));
        }
    }
}
