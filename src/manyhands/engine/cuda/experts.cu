/* Routers and experts. */

/* Takes the best of ranks [n] that are not taken yet, of equals the first; the first of all if that is not a number. One warp. */
INLINE int take_best(const float *ranks, int n, char *taken, int *best_places)
{
    int lane = threadIdx.x, best = -1, first = n;
    for (int e = lane; e < n; e += 32)
        if (!taken[e]) {
            first = first == n ? e : first;
            if (!is_nan(ranks[e]) && (best < 0 || ranks[e] > ranks[best]))
                best = e;
        }
    best_places[lane] = best, best_places[32 + lane] = first;
    __syncthreads();
    for (int other = 0; other < 32; other++) {
        int place = best_places[other], earliest = best_places[32 + other];
        first = earliest < first ? earliest : first;
        if (place >= 0 && (best < 0 || ranks[place] > ranks[best] || (ranks[place] == ranks[best] && place < best)))
            best = place;
    }
    int found = best < 0 || is_nan(ranks[first]) ? first : best;
    __syncthreads();
    if (lane == 0)
        taken[found] = 1;
    __syncthreads();
    return found;
}

/* As `mixed` in engine/native/kernels.c. */
INLINE float mixed(const float *logits, int n, const int *chosen, int i, float threshold)
{
    float most = logits[chosen[i]], sum = 0;
    for (int e = 0; e < n; e++) {
        float size = size_of(logits[e]), larger = size > most ? size : most;
        bool is_before = false;
        for (int j = 0; j < i; j++)
            is_before = is_before || chosen[j] == e;
        if (!is_before && !((most - logits[e]) / larger > threshold))
            sum = sum + exponential(logits[e] - most);
    }
    return 1 / sum;
}

/* Grid (rows), 32 threads. n: experts, top k, score (kernels.h), normalises, groups, top groups, whether a group ranks by its best alone. reals: scale, epsilon. tensors: correction, factors. */
KERNEL(route)
{
    await_rows();
    __shared__ float scores[MOST_EXPERTS + SIDE], ranks[MOST_EXPERTS], sums[MOST_EXPERTS];
    __shared__ char taken[MOST_EXPERTS], seen[MOST_EXPERTS];
    __shared__ int places[64], chosen[MOST_EXPERTS];
    const int t = threadIdx.x, n = (int)a.n[0], top_k = (int)a.n[1], groups = (int)a.n[4], size = n / groups, whole = (n + SIDE - 1) / SIDE * SIDE;
    const bool by_logit = a.n[2] == BY_LOGIT, is_softmax = a.n[2] != BY_SIGMOID && !by_logit;
    const float *logits = a.x + blockIdx.x * a.x_stride, *correction = (const float *)a.tensors[0], *factors = (const float *)a.tensors[1];
    float *pairs = a.out + blockIdx.x * a.out_stride, lane = -infinity();
    for (int e = t % SIDE; e < n && is_softmax; e += SIDE)
        lane = more(logits[e], lane);
    float top = first_lane(tree_more(lane));
    for (int e = t; e < whole; e += 32)
        scores[e] = e >= n ? (is_softmax ? exponential(-infinity() - top) : 0) : is_softmax ? exponential(logits[e] - top) : sigmoid(logits[e]);
    __syncthreads();
    float total = 0;
    for (int e = t % SIDE; e < whole; e += SIDE)
        total = total + scores[e];
    total = first_lane(tree_sum(total));
    __syncthreads();
    for (int e = t; e < n; e += 32) {
        scores[e] = is_softmax ? scores[e] / total : scores[e];
        ranks[e] = by_logit || (is_softmax && !correction) ? logits[e] : scores[e];
        ranks[e] = correction ? ranks[e] + correction[e] : ranks[e];
        taken[e] = 0;
    }
    __syncthreads();
    if (groups > 1) {
        for (int e = t; e < n; e += 32)
            seen[e] = 0;
        __syncthreads();
        for (int group = 0; group < groups; group++) {
            int one = take_best(ranks + group * size, size, seen + group * size, places);
            int two = a.n[6] ? one : take_best(ranks + group * size, size, seen + group * size, places);
            if (t == 0)
                sums[group] = a.n[6] ? ranks[group * size + one] : ranks[group * size + one] + ranks[group * size + two];
            __syncthreads();
        }
        for (int group = t; group < groups; group += 32)
            seen[group] = 0;
        __syncthreads();
        for (int i = 0; i < a.n[5]; i++)
            take_best(sums, groups, seen, places);
        for (int e = t; e < n; e += 32)
            taken[e] = !seen[e / size];
        __syncthreads();
    }
    for (int i = 0; i < top_k; i++) {
        int found = take_best(ranks, n, taken, places);
        if (t == 0)
            chosen[i] = found;
    }
    if (t != 0)
        return;
    float most = logits[chosen[0]], sum = 0, scale = (float)a.reals[0];
    for (int i = 1; i < top_k; i++)
        most = logits[chosen[i]] > most ? logits[chosen[i]] : most;
    for (int i = 0; i < top_k; i++) {
        float weight = a.n[2] == BY_MIXER ? mixed(logits, n, chosen, i, (float)a.reals[1]) : a.n[3] && is_softmax ? exponential(logits[chosen[i]] - most) : scores[chosen[i]];
        sum = sum + weight;
        pairs[2 * i] = (float)chosen[i], pairs[2 * i + 1] = weight;
    }
    float by = !a.n[3] ? 1 : is_softmax ? sum : sum + (float)a.reals[1];
    for (int i = 0; i < top_k; i++) {
        float weight = pairs[2 * i + 1] / by * scale;
        pairs[2 * i + 1] = factors ? weight * factors[chosen[i]] : weight;
    }
}

/* The expert of route `pair` of all rows' (row * top k + route); -1 for none. y: routes. n: experts, top k. */
INLINE int expert_of(const Args &a, count_t pair, count_t experts, count_t top_k)
{
    float named = a.y[pair / top_k * a.y_stride + pair % top_k * 2];
    return named >= 0 && named < (float)experts ? (int)named : -1;
}

/* A row with its expert's matrices. Grid (panels of all parts, rows times top k). n: k, rounds, bytes of an expert's matrix, experts, top k, and
 * whether x has a row for each route. The results have a row for each route. */
template <int TYPE> INLINE void expert_product(const Args &a)
{
    await_rows();
    count_t pair = blockIdx.y;
    int expert = expert_of(a, pair, a.n[3], a.n[4]);
    if (expert < 0)
        return;
    const Part *part = part_of(a, blockIdx.x);
    Matrix m = {part->packed + expert * a.n[2], part->bias ? part->bias + expert * part->n : nullptr,
                a.x + (a.n[5] ? pair : pair / a.n[4]) * a.x_stride, part->out + pair * part->out_stride, 0, 0, part->n, a.n[0], part->activation, a.n[1]};
    few<TYPE, 1, 1, false>(m, blockIdx.x - part->first, 0, 1);
}

KERNEL(expert_BF16) { expert_product<BF16>(a); }
KERNEL(expert_F16) { expert_product<F16>(a); }
KERNEL(expert_F32) { expert_product<F32>(a); }

/* Rows times the weights of their routes: a row for each route. n: width, top k. */
KERNEL(expert_scale)
{
    await_rows();
    count_t at = column_of(), pair = blockIdx.y, row = pair / a.n[1];
    if (at < a.n[0])
        a.out[pair * a.out_stride + at] = a.x[row * a.x_stride + at] * a.y[row * a.y_stride + pair % a.n[1] * 2 + 1];
}

/* Results (x, a row for each route) -> sums in the routes' order. n: width, experts, top k, whether weights are in the results already, identities (the
 * experts behind the others, which give their source: the only part's rows). */
KERNEL(expert_sum)
{
    await_rows();
    count_t at = column_of(), row = blockIdx.y, top_k = a.n[2];
    if (at >= a.n[0])
        return;
    float sum = 0;
    for (count_t route = 0; route < top_k; route++) {
        count_t pair = row * top_k + route;
        const bool is_expert = expert_of(a, pair, a.n[1], top_k) >= 0;
        if (!is_expert && expert_of(a, pair, a.n[1] + a.n[4], top_k) < 0)
            continue;
        float v = is_expert ? a.x[pair * a.x_stride + at] : a.parts[0].out[row * a.parts[0].out_stride + at], weight = a.n[3] ? 1 : a.y[row * a.y_stride + 2 * route + 1];
        sum = sum + (weight != 1 ? v * weight : v);
    }
    a.out[row * a.out_stride + at] = sum;
}
