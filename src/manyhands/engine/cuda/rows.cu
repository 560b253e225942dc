/* Operations on rows by themselves: what products, attention and experts leave. A block is 256 threads; grids are (blocks of columns, rows)
 * unless said otherwise. Numbers and reals are an operation's own (engine/native/plan.c) where nothing else is said. */

INLINE count_t column_of() { return (count_t)blockIdx.x * THREADS + threadIdx.x; }

/* Rows as they came in -> a register. n: width, type. tensors: the rows. */
KERNEL(widen)
{
    await_rows();
    count_t at = column_of(), row = blockIdx.y, place = row * a.n[0] + at;
    if (at < a.n[0])
        a.out[row * a.out_stride + at] = a.n[1] == BF16 ? real_of((unsigned)((const half_t *)a.tensors[0])[place] << 16) : ((const float *)a.tensors[0])[place];
}

/* A register -> rows as they leave. n: width, type. tensors: the rows. */
KERNEL(narrow)
{
    await_rows();
    count_t at = column_of(), row = blockIdx.y, place = row * a.n[0] + at;
    if (at >= a.n[0])
        return;
    float v = a.x[row * a.x_stride + at];
    if (a.n[1] == BF16)
        ((half_t *)a.tensors[0])[place] = (half_t)(bits_of(round_bf16(v)) >> 16);
    else
        ((unsigned *)a.tensors[0])[place] = is_nan(v) ? 0x7FC00000 : bits_of(v);
}

/* A sum over n numbers: lane i takes numbers i, i + 16, ... in order, then the tree; of squares of what differs from `mean`, or as they
 * are. room: SUMMED numbers of the block. Every thread gets it. */
enum { SUMMED = 4096 };
INLINE float lanes_sum(const float *x, int n, bool is_square, float mean, float *room)
{
    float sum = 0;
    int lane = threadIdx.x % SIDE;
    for (int first = 0; first < n; first += SUMMED) {
        const int count = n - first < SUMMED ? n - first : SUMMED;
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += THREADS)
            room[i] = x[first + i];
        __syncthreads();
#pragma unroll 8
        for (int i = lane; i < count; i += SIDE) {
            float v = room[i] - mean;
            sum = is_square ? fma_(v, v, sum) : sum + room[i];
        }
    }
    return first_lane(tree_sum(sum));
}

/* Grid (groups, rows). n: width of a group, is_layer, weight and bias of each group (1) or one for all (0). With y, x = x + y scale
 * first, which x keeps (groups: 1); then n: whether that is rounded. reals: epsilon, offset, scale. */
KERNEL(norm)
{
    await_rows();
    __shared__ float room[SUMMED];
    const int width = (int)a.n[0], t = threadIdx.x;
    const count_t group = blockIdx.x, row = blockIdx.y;
    float *x = (float *)a.x + row * a.x_stride + group * width, *out = a.out + row * a.out_stride + group * width;
    const float *weight = (const float *)a.tensors[0], *bias = (const float *)a.tensors[1];
    const float epsilon = (float)a.reals[0], offset = (float)a.reals[1], by = (float)a.reals[2];
    weight = weight && a.n[2] ? weight + group * width : weight;
    bias = bias && a.n[3] ? bias + group * width : bias;
    for (int at = t; at < width && a.y; at += THREADS) {
        float v = a.y[row * a.y_stride + at];
        x[at] = rounded_if(a.n[4], x[at] + (by != 1 ? v * by : v));
    }
    __syncthreads();
    float mean = a.n[1] ? lanes_sum(x, width, false, 0, room) / (float)width : 0;
    float square = lanes_sum(x, width, true, mean, room) / (float)width;
    float scale = 1 / sqrtf(square + epsilon);
    __syncthreads();
    for (int at = t; at < width; at += THREADS) {
        float v = ((width <= SUMMED ? room[at] : x[at]) - mean) * scale;
        if (weight)
            v = v * (offset != 0 ? offset + weight[at] : weight[at]);
        out[at] = bias ? v + bias[at] : v;
    }
}

INLINE double whole(double x) { return (x + 6755399441055744.0) - 6755399441055744.0; }

/* As turn in engine/native/tables.c. */
INLINE void turn(double x, double *sine, double *cosine)
{
    double n = whole(x * 0x1.45f306dc9c883p-1);
    double r = x - n * 0x1.921fb54400000p0 - n * 0x1.0b4611a600000p-34 - n * 0x1.3198a2e037073p-69, z = r * r, s = 1, c = 1;
    for (int i = 16; i; i -= 2) {
        s = 1 - s * z / (i * (i + 1));
        c = 1 - c * z / (i * (i - 1));
    }
    s = s * r;
    switch ((count_t)n & 3) {
    case 0: *sine = s, *cosine = c; break;
    case 1: *sine = c, *cosine = -s; break;
    case 2: *sine = -s, *cosine = -c; break;
    default: *sine = -c, *cosine = s;
    }
}

INLINE double two_to(count_t n) { return __longlong_as_double((n + 1023) << 52); }

/* As exp_of in engine/native/tables.c. */
INLINE double exponential_of(double x)
{
    if (x != x || x > 709.78)
        return x != x ? x : (double)infinity();
    if (x < -708)
        return 0;
    double n = whole(x * 0x1.71547652b82fep0), r = x - n * 0x1.62e42fee00000p-1 - n * 0x1.a39ef35793c76p-33, sum = 1;
    for (int i = 14; i; i--)
        sum = 1 + sum * r / i;
    count_t half = (count_t)n / 2;
    return sum * two_to(half) * two_to((count_t)n - half);
}

/* As log_of there, of a number from 1 on, or of none. */
INLINE double logarithm_of(double x)
{
    if (!(x < (double)infinity()))
        return x;
    count_t bits = __double_as_longlong(x), n = (bits >> 52) - 1023;
    double m = __longlong_as_double((bits & 0xFFFFFFFFFFFFF) | 0x3FF0000000000000);
    if (m > 0x1.6a09e667f3bcdp0)
        m = m / 2, n++;
    double s = (m - 1) / (m + 1), z = s * s, sum = 0;
    for (int i = 23; i > 1; i -= 2)
        sum = (sum + 1.0 / i) * z;
    return (double)n * 0x1.62e42fee00000p-1 + ((double)n * 0x1.a39ef35793c76p-33 + (2 * s * sum + 2 * s));
}

/* Cosines and sines of the rows' positions. n: turns. tensors: frequencies. reals: factor. */
KERNEL(angles)
{
    await_rows();
    count_t at = column_of(), row = blockIdx.y, turns = a.n[0];
    if (at >= turns)
        return;
    float angle = (float)a.rows[row].position * ((const float *)a.tensors[0])[at];
    if (!(angle >= -16777216.0f && angle <= 16777216.0f))
        angle = 0;
    double sine, cosine;
    turn(angle, &sine, &cosine);
    a.out[row * a.out_stride + at] = (float)(cosine * a.reals[0]);
    a.out[row * a.out_stride + turns + at] = (float)(sine * a.reals[0]);
}

/* Columns are turns of all heads of all parts: rows of two registers turn at once. Of a part, out and n: its heads. y: the angles. n:
 * width, offset, turns, pairs. */
KERNEL(rotary)
{
    await_rows();
    const Part *part = part_of(a, blockIdx.x);
    const int at = (int)(blockIdx.x - part->first) * THREADS + threadIdx.x, turns = (int)a.n[2];
    if (at >= part->n * turns)
        return;
    const int head = at / turns, i = at % turns, step = a.n[3] ? 2 : 1, other = a.n[3] ? 1 : turns;
    float *x = part->out + blockIdx.y * part->out_stride + head * a.n[0] + a.n[1] + i * step;
    const float *angles = a.y + blockIdx.y * a.y_stride;
    float first = x[0], second = x[other], c = angles[i], s = angles[turns + i];
    x[0] = first * c - second * s;
    x[other] = second * c + first * s;
}

/* n: width, activation. reals: alpha, limit (below 0: of activated gates), offset. */
KERNEL(gate)
{
    await_rows();
    count_t at = column_of(), row = blockIdx.y;
    if (at >= a.n[0])
        return;
    float g = a.x[row * a.x_stride + at], u = a.y[row * a.y_stride + at], limit = (float)a.reals[1], offset = (float)a.reals[2];
    const float most = limit < 0 ? minus(limit) : limit;
    g = limit > 0 && most < g ? most : g;
    if (limit != 0) {
        u = most < u ? most : u;
        u = u < minus(most) ? minus(most) : u;
    }
    u = offset != 0 ? u + offset : u;
    g = activate(a.n[1], (float)a.reals[0], g);
    a.out[row * a.out_stride + at] = (limit < 0 && most < g ? most : g) * u;
}

/* out = x + y scale. n: width, rounds. */
KERNEL(add)
{
    await_rows();
    count_t at = column_of(), row = blockIdx.y;
    if (at >= a.n[0])
        return;
    float v = a.y[row * a.y_stride + at], scale = (float)a.reals[0];
    a.out[row * a.out_stride + at] = rounded_if(a.n[1], a.x[row * a.x_stride + at] + (scale != 1 ? v * scale : v));
}

/* out = x, each part of it times its column of y. n: width, width of a part. */
KERNEL(multiply)
{
    await_rows();
    count_t at = column_of(), row = blockIdx.y;
    if (at < a.n[0])
        a.out[row * a.out_stride + at] = a.x[row * a.x_stride + at] * a.y[row * a.y_stride + at / a.n[1]];
}

/* In place, times the factor of the row's position (position_scale in engine/native/tables.c). n: width, length, offset, growth. reals: beta. */
KERNEL(scale)
{
    await_rows();
    __shared__ float factor[1];
    const count_t at = column_of(), row = blockIdx.y;
    const count_t position = a.rows[row].position + a.n[2];
    const double lengths = (double)position / (double)a.n[1];
    if (!threadIdx.x) {
        const double log = logarithm_of(a.n[3] == 1 ? 1 + lengths : a.n[3] == 2 ? lengths : (double)(1 + position / a.n[1]));
        factor[0] = (float)(a.n[3] == 1 ? exponential_of(a.reals[0] * log) : 1 + a.reals[0] * log);
        if (a.n[3] == 2 && position <= a.n[1])
            factor[0] = 1;
    }
    __syncthreads();
    if (at < a.n[0])
        a.out[row * a.out_stride + at] = a.out[row * a.out_stride + at] * factor[0];
}

/* Rows of a table by position. n: width, type, offset. tensors: the table. */
KERNEL(position)
{
    await_rows();
    const count_t at = column_of(), row = blockIdx.y;
    if (at >= a.n[0])
        return;
    const count_t place = (a.rows[row].position + a.n[2]) * a.n[0] + at;
    if (a.n[1] == F32)
        a.out[row * a.out_stride + at] = ((const float *)a.tensors[0])[place];
    else {
        const unsigned half = ((const half_t *)a.tensors[0])[place];
        a.out[row * a.out_stride + at] = a.n[1] == BF16 ? real_of(half << 16) : from_f16(half);
    }
}

/* In place, as `xielu` in engine/native/kernels.c. n: width. tensors: its numbers. */
KERNEL(xielu)
{
    await_rows();
    const count_t at = column_of(), row = blockIdx.y;
    if (at >= a.n[0])
        return;
    const float *by = (const float *)a.tensors[0], v = a.out[row * a.out_stride + at], linear = v * by[2];
    const float above = (v * by[0]) * v + linear, t = minus(more(minus(by[3]), minus(v)));
    const float below = (expm1_less(t) + (t - v)) * by[1] + linear;
    a.out[row * a.out_stride + at] = 0 < v ? above : below;
}

/* In place. n: width. reals: scale, soft cap. */
KERNEL(soften)
{
    await_rows();
    count_t at = column_of(), row = blockIdx.y;
    if (at >= a.n[0])
        return;
    float *place = a.out + row * a.out_stride + at, v = *place, scale = (float)a.reals[0], cap = (float)a.reals[1];
    v = scale != 1 ? v * scale : v;
    const unsigned within = v < cap ? bits_of(cap) : v > -cap ? bits_of(-cap) : bits_of(v); /* as numbers: a minimum flushes denormals */
    *place = cap > 0 ? hyperbolic(v / cap) * cap : cap < 0 ? real_of(within) : v;
}

/* n: source column, target column, count, times, source step, target step, rounds. tensors: which columns (int32), or null. */
KERNEL(copy)
{
    await_rows();
    count_t at = column_of(), row = blockIdx.y;
    if (at >= a.n[2] * a.n[3])
        return;
    count_t time = at / a.n[2], i = at % a.n[2];
    const int *columns = (const int *)a.tensors[0];
    float v = a.x[row * a.x_stride + a.n[0] + time * a.n[4] + (columns ? columns[i] : i)];
    a.out[row * a.out_stride + a.n[1] + time * a.n[5] + i] = rounded_if(a.n[6], v);
}

/* out[at] = function(x[at]), for the digests. n: count, function: activations, then 7 exp, 8 tanh, 9 erf. reals: alpha. */
KERNEL(apply)
{
    await_rows();
    count_t at = column_of(), function = a.n[1];
    if (at >= a.n[0])
        return;
    float v = a.x[at];
    v = function == 7 ? exponential(v) : function == 8 ? hyperbolic(v) : function == 9 ? error_of(v) : activate(function, (float)a.reals[0], v);
    ((unsigned *)a.out)[at] = is_nan(v) ? 0x7FC00000 : bits_of(v);
}
