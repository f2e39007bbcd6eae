// Floats of fewer bits: a format has so many bits of mantissa, a bias of the exponent, and a largest
// value, at which it saturates. Rounding is to nearest, ties to even.

struct Format {
    u32 mantissa;
    u32 bias;
    float top;
};

static __device__ float power_of_two(int exponent) {
    return __uint_as_float((u32)(exponent + 127) << 23);
}

// The code of |x|, which is a number.
static __device__ u32 narrowed(float x, Format form) {
    const float kept = fabsf(x) < form.top ? fabsf(x) : form.top;
    const u32 bits = __float_as_uint(kept);
    if (kept < power_of_two(1 - (int)form.bias)) {
        // The sum's last bits are the multiple of the format's smallest step, rounded to even.
        const float align = power_of_two(24 - (int)(form.bias + form.mantissa));
        return __float_as_uint(kept + align) - __float_as_uint(align);
    }
    const u32 cut = 23 - form.mantissa;
    const u32 half = (1u << (cut - 1)) - 1;
    return ((bits + half + (bits >> cut & 1)) >> cut) - ((127 - form.bias) << form.mantissa);
}

// The value of a code without its sign, of a finite number.
static __device__ float widened(u32 code, Format form) {
    const u32 exponent = code >> form.mantissa;
    const u32 fraction = code & ((1u << form.mantissa) - 1);
    if (exponent == 0) {
        return (float)fraction * power_of_two(1 - (int)(form.bias + form.mantissa));
    }
    return __uint_as_float(
        (exponent + 127 - form.bias) << 23 | fraction << (23 - form.mantissa)
    );
}
