/* exp, log, pow, sine and cosine in IEEE double basic operations, for rotary tables and the sampler: never a library's, whose
 * bits differ between machines. Errors stay below 2e-15 of the result (exp, log, pow: of their range), 3e-16 (sine, cosine). */
#include <stdint.h>
#include <string.h>

#include "modes.h"
#include "plan.h"

#define INFINITY_ __builtin_inf()

static double double_of(uint64_t bits)
{
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

static uint64_t bits_of_double(double value)
{
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return bits;
}

static double whole(double x) { return x + 0x1.8p52 - 0x1.8p52; } /* the nearest whole number, |x| < 2^51 */
static double power_of_two(int64_t n) { return double_of((uint64_t)(n + 1023) << 52); }

/* 2^n times the series of e^r to r^14, |r| <= ln 2 / 2. Below -708: zero. */
static double exp_of(double x)
{
    if (x != x || x > 709.78)
        return x != x ? x : INFINITY_;
    if (x < -708)
        return 0;
    double n = whole(x * 0x1.71547652b82fep0), r = x - n * 0x1.62e42fee00000p-1 - n * 0x1.a39ef35793c76p-33, sum = 1;
    for (int i = 14; i; i--)
        sum = 1 + sum * r / i;
    int64_t half = (int64_t)n / 2;
    return sum * power_of_two(half) * power_of_two((int64_t)n - half);
}

/* n ln 2 + 2 (s + s^3 / 3 + ...), s = (m - 1) / (m + 1), to s^23. */
static double log_of(double x)
{
    if (!(x >= 0x1p-1022))
        return x >= 0 ? -INFINITY_ : double_of(0x7FF8000000000000);
    if (x == INFINITY_)
        return x;
    uint64_t bits = bits_of_double(x);
    int64_t n = (int64_t)(bits >> 52) - 1023;
    double m = double_of((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000);
    if (m > 0x1.6a09e667f3bcdp0)
        m = m / 2, n++;
    double s = (m - 1) / (m + 1), z = s * s, sum = 0;
    for (int i = 23; i > 1; i -= 2)
        sum = (sum + 1.0 / i) * z;
    return (double)n * 0x1.62e42fee00000p-1 + ((double)n * 0x1.a39ef35793c76p-33 + (2 * s * sum + 2 * s));
}

/* Sine and cosine for |x| <= 2^24: x less the nearest quarter turn n (three parts of 33 bits), then the series to r^17, r^16. */
static void turn(double x, double *sine, double *cosine)
{
    double n = whole(x * 0x1.45f306dc9c883p-1);
    double r = x - n * 0x1.921fb54400000p0 - n * 0x1.0b4611a600000p-34 - n * 0x1.3198a2e037073p-69, z = r * r, s = 1, c = 1;
    for (int i = 16; i; i -= 2) {
        s = 1 - s * z / (i * (i + 1));
        c = 1 - c * z / (i * (i - 1));
    }
    s = s * r;
    switch ((int64_t)n & 3) {
    case 0: *sine = s, *cosine = c; break;
    case 1: *sine = c, *cosine = -s; break;
    case 2: *sine = -s, *cosine = -c; break;
    default: *sine = -c, *cosine = s;
    }
}

void rope_angles(const float *frequencies, int64_t turns, double factor, int64_t position, float *cos, float *sin)
{
    for (int64_t i = 0; i < turns; i++) {
        double sine, cosine;
        float angle = (float)position * frequencies[i];
        if (!(angle >= -0x1p24f && angle <= 0x1p24f))
            angle = 0;
        turn(angle, &sine, &cosine);
        cos[i] = (float)(cosine * factor);
        sin[i] = (float)(sine * factor);
    }
}

double position_log(int64_t length, int64_t position) { return log_of((double)(1 + position / length)); }

float position_scale(double beta, int64_t length, int64_t position, int64_t growth)
{
    if (growth == BY_LENGTHS)
        return (float)(position > length ? 1 + beta * log_of((double)position / (double)length) : 1);
    if (growth == BY_POWER)
        return (float)exp_of(beta * log_of(1 + (double)position / (double)length));
    return (float)(1 + beta * position_log(length, position));
}

void decay_row(const float *x, const double *rates, const float *bias, int64_t n, float *out)
{
    for (int64_t i = 0; i < n; i++) {
        double v = (double)x[i] + bias[i], soft = v > 20 ? v : log_of(1 + exp_of(v));
        out[i] = (float)(rates ? exp_of(-rates[i] * soft) : soft);
    }
}

/* cos, sin [positions, turns], from position `first` on, for the digests. */
EXPORT int mh_rope(const float *frequencies, int64_t turns, double factor, int64_t first, int64_t positions, float *cos, float *sin)
{
    if (first < 0 || positions < 0 || first + positions > 1 << 24)
        return -1;
    uint64_t modes = modes_enter();
    for (int64_t i = 0; i < positions; i++)
        rope_angles(frequencies, turns, factor, first + i, cos + i * turns, sin + i * turns);
    modes_leave(modes);
    return 0;
}

/* out[i] = function(x[i]): 0 exp, 1 log, 2 sine, 3 cosine, 4 x^y by e^(y log x) (y: one number). */
EXPORT int mh_double(int64_t function, const double *x, double y, double *out, int64_t n)
{
    if (function < 0 || function > 4)
        return -1;
    uint64_t modes = modes_enter();
    for (int64_t i = 0; i < n; i++) {
        double sine = 0, cosine = 0;
        if (function == 2 || function == 3)
            turn(x[i] >= -0x1p24 && x[i] <= 0x1p24 ? x[i] : 0, &sine, &cosine);
        out[i] = function == 0   ? exp_of(x[i])
                 : function == 1 ? log_of(x[i])
                 : function == 2 ? sine
                 : function == 3 ? cosine
                                 : exp_of(y * log_of(x[i]));
    }
    modes_leave(modes);
    return 0;
}
