/* exp, tanh, sigmoid and the activations, on lanes. Polynomials of our own (Chebyshev fits); docs/arithmetic.md has their
 * coefficients and the order of every operation. */
#ifndef MANYHANDS_FUNCTIONS_H
#define MANYHANDS_FUNCTIONS_H
#include "kernels.h"
#include "lanes.h"

#define WHOLE 0x1.8p23f /* added to a number it leaves the nearest whole one in the lowest bits */
#define HORNER(p, x, c) p = fma_(p, x, set(c))

#define FOR_EACH(i, count) _Pragma("GCC unroll 4") for (int i = 0; i < (count); i++)
#define HORNERS(p, x, c) FOR_EACH(i, count) HORNER(p[i], x[i], c)

/* e^r, r = x - n ln 2, |r| <= ln 2 / 2, of a few numbers (at most 4, a constant) at once: an operation waits for the one before it, and
 * those of the others are there to do meanwhile. Into x. */
INLINE void powers_near_one(int count, V *x, const V *n)
{
    V p[4], square[4];
    FOR_EACH(i, count) x[i] = fma_(n[i], set(-0.693359375f), x[i]);
    FOR_EACH(i, count) x[i] = fma_(n[i], set(2.12194440e-4f), x[i]);
    FOR_EACH(i, count) p[i] = fma_(set(0.00019899286f), x[i], set(0.0013933651f));
    HORNERS(p, x, 0.008333298f);
    HORNERS(p, x, 0.041666467f);
    HORNERS(p, x, 0.16666667f);
    HORNERS(p, x, 0.5f);
    FOR_EACH(i, count) square[i] = mul(x[i], x[i]);
    FOR_EACH(i, count) x[i] = fma_(square[i], p[i], x[i]);
    FOR_EACH(i, count) x[i] = add(x[i], set(1));
}

static inline V power_near_one(V x, V n)
{
    powers_near_one(1, &x, &n);
    return x;
}

/* e^x: 2^n e^r; infinity above 89, zero below -104. NaN stays: `more` gives its second operand then. */
static inline V exponential(V number)
{
    V x = more(set(-104), number);
    x = minus(more(set(-89), minus(x)));
    V shifted = fma_(x, set(1.44269504f), set(WHOLE)), n = sub(shifted, set(WHOLE)), p = power_near_one(x, n);
    V first = fma_(n, set(0.5f), set(WHOLE)), second = add(sub(n, sub(first, set(WHOLE))), set(WHOLE));
    return mul(mul(p, power_of_two(first)), power_of_two(second));
}

/* e^x of `count` numbers that are at most zero: the bits of `exponential`, in two thirds of the operations. Below -88 a result would be
 * denormal, and is zero. From there 2^n is normal, or zero for n = -127, where the result is. */
INLINE void exponentials_down(int count, V *x)
{
    V shifted[4], n[4];
    FOR_EACH(i, count) x[i] = more(set(-88), x[i]);
    FOR_EACH(i, count) shifted[i] = fma_(x[i], set(1.44269504f), set(WHOLE));
    FOR_EACH(i, count) n[i] = sub(shifted[i], set(WHOLE));
    powers_near_one(count, x, n);
    FOR_EACH(i, count) x[i] = mul(x[i], power_of_two(shifted[i]));
}

static inline V exponential_down(V x)
{
    exponentials_down(1, &x);
    return x;
}

/* e^x - 1 - x. Near zero x^2 times the polynomial of e^x, which loses no digits. */
static inline V expm1_less(V x)
{
    V p = set(0.00019899286f);
    HORNER(p, x, 0.0013933651f);
    HORNER(p, x, 0.008333298f);
    HORNER(p, x, 0.041666467f);
    HORNER(p, x, 0.16666667f);
    HORNER(p, x, 0.5f);
    V far = sub(sub(exponential(x), set(1)), x);
    return pick(below(size_of(x), set(0.34375f)), mul(mul(x, x), p), far);
}

/* 1 / (1 + e^-x) as e / (1 + e) or 1 / (1 + e) with e = e^-|x|. */
static inline V sigmoid(V x)
{
    V small = exponential_down(minus(size_of(x)));
    return div_(pick(below(x, set(0)), small, set(1)), add(set(1), small));
}

/* Below 0.625 x + x^3 P(x^2), beyond 1 - 2 / (e^2|x| + 1) with x's sign. */
static inline V hyperbolic(V x)
{
    V size = size_of(x), z = mul(x, x), p = set(-0.0060536913f);
    HORNER(p, z, 0.020968182f);
    HORNER(p, z, -0.05384499f);
    HORNER(p, z, 0.13332734f);
    HORNER(p, z, -0.33333328f);
    V near = fma_(mul(x, z), p, x);
    V far = sub(set(1), div_(set(2), add(exponential(add(size, size)), set(1))));
    far = pick(below(x, set(0)), minus(far), far);
    return pick(below(size, set(0.625f)), near, far);
}

/* The error function: below 1 x P(x^2), beyond 1 - e^Q(|x|) with x's sign. */
static inline V error_of(V x)
{
    V size = size_of(x), z = mul(x, x), p = set(-9.67359e-06f), q = set(-8.905024e-08f);
    HORNER(p, z, 0.00011268254f);
    HORNER(p, z, -0.00084843964f);
    HORNER(p, z, 0.0052210535f);
    HORNER(p, z, -0.026865438f);
    HORNER(p, z, 0.11283783f);
    HORNER(p, z, -0.37612638f);
    HORNER(p, z, 1.1283792f);
    V t = minus(more(minus(size), set(-4.2f)));
    HORNER(q, t, 3.6093509e-06f);
    HORNER(q, t, -6.501158e-05f);
    HORNER(q, t, 0.00070037664f);
    HORNER(q, t, -0.005113663f);
    HORNER(q, t, 0.027205212f);
    HORNER(q, t, -0.11120332f);
    HORNER(q, t, -0.6308233f);
    HORNER(q, t, -1.1307392f);
    HORNER(q, t, 0.0004299823f);
    V far = sub(set(1), exponential(q));
    far = pick(below(x, set(0)), minus(far), far);
    far = pick(is_nan(x), x, far);
    return pick(below(size, set(1)), mul(x, p), far);
}

/* e^-(rate softplus(x)): softplus is the larger of x and 0, and log(1 + e^-|x|) = 2 artanh(z) as z P(z^2), z at most a third. */
static inline V decay_of(V x, V rate)
{
    V small = exponential_down(minus(size_of(x))), z = div_(small, add(set(2), small)), square = mul(z, z), p = set(0.28174675f);
    HORNER(p, square, 0.27961433f);
    HORNER(p, square, 0.4002485f);
    HORNER(p, square, 0.66666317f);
    HORNER(p, square, 2);
    return exponential_down(minus(mul(rate, fma_(z, p, more(x, set(0))))));
}


/* alpha: of silu alone, x sigmoid(alpha x). */
static inline V activate(int64_t activation, float alpha, V x)
{
    switch (activation) {
    case SILU:
        return mul(x, sigmoid(alpha == 1 ? x : mul(x, set(alpha))));
    case GELU:
        return mul(mul(x, set(0.5f)), add(set(1), error_of(mul(x, set(0.70710678f)))));
    case GELU_TANH: { /* x / 2 (1 + tanh z) is x sigmoid(2 z) */
        V cube = mul(mul(x, x), x);
        return mul(x, sigmoid(mul(fma_(cube, set(0.044715f), x), set(1.5957691216f))));
    }
    case RELU:
        return more(x, set(0));
    case RELU2: {
        V above = more(x, set(0));
        return mul(above, above);
    }
    case SIGMOID:
        return sigmoid(x);
    default:
        return x;
    }
}
#endif
