// A decode step on a CPU, bound by reading the weights once. Float32 sums, whatever the weights' type.
//
// Shapes: P rows (of one or more groups), D width, H heads, K head size, C capacity, M memory slots.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/cpu/vec/vec.h>
#include <omp.h>
#include <torch/custom_class.h>
#include <torch/library.h>

using Vec = at::vec::Vectorized<float>;

typedef float vec __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(32)));
typedef uint16_t halves __attribute__((vector_size(16)));

static const int64_t AHEAD = 32768;  // bytes that are asked for before they are needed
static const int64_t NEAR = 512;  // weights asked for ahead where one output is read at a time

// ---------------------------------------------------------------------------- vectors

static inline vec load(const float* p) {
  vec v;
  __builtin_memcpy(&v, p, 32);
  return v;
}

static inline vec load(const at::BFloat16* p) {
  halves h;
  __builtin_memcpy(&h, p, 16);
  words w = __builtin_convertvector(h, words) << 16;
  vec v;
  __builtin_memcpy(&v, &w, 32);
  return v;
}

static inline void store(float* p, vec v) { __builtin_memcpy(p, &v, 32); }

static inline float sum(vec v) {
  vec4 a, b;
  __builtin_memcpy(&a, &v, 16);
  __builtin_memcpy(&b, (const char*)&v + 16, 16);
  a += b;
  return (a[0] + a[2]) + (a[1] + a[3]);
}

template <typename A, typename B>
static float dot(const A* a, const B* b, int64_t n) {
  vec acc = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) acc += load(a + i) * load(b + i);
  float s = sum(acc);
  for (; i < n; i++) s += float(a[i]) * float(b[i]);
  return s;
}

// y += c·x
template <typename T>
static void add(float* y, float c, const T* x, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) store(y + i, load(y + i) + c * load(x + i));
  for (; i < n; i++) y[i] += c * float(x[i]);
}

static void softmax(float* x, int64_t n) {
  const float peak = *std::max_element(x, x + n);
  for (int64_t i = 0; i < n; i += Vec::size()) {
    const int64_t count = std::min<int64_t>(Vec::size(), n - i);
    (Vec::loadu(x + i, count) - Vec(peak)).exp().store(x + i, count);
  }
  float total = 0;
  for (int64_t i = 0; i < n; i++) total += x[i];
  for (int64_t i = 0; i < n; i++) x[i] /= total;
}

static void gelu(float* x, int64_t n) {
  for (int64_t i = 0; i < n; i += Vec::size()) {
    const int64_t count = std::min<int64_t>(Vec::size(), n - i);
    const Vec v = Vec::loadu(x + i, count);
    (v * Vec(0.5f) * (Vec(1.f) + (v * Vec(float(M_SQRT1_2))).erf())).store(x + i, count);
  }
}

// ---------------------------------------------------------------------------- threads

struct Range {
  int64_t from, to;
};

// Every thread of a call and its place among them. Between two calls of `wait`, a thread writes only
// its own share of what the others read.
struct Team {
  int64_t index, size;

  // In units, so that a sum is the same however many threads there are.
  Range share(int64_t n, int64_t unit = 16) const {
    const int64_t units = (n + unit - 1) / unit;
    return {
        std::min(n, units * index / size * unit), std::min(n, units * (index + 1) / size * unit)};
  }
  void wait() const {
#pragma omp barrier
  }
};

template <typename F>
static void together(int64_t weights, const F& f) {
  const int most = at::in_parallel_region() ? 1 : at::get_num_threads();
  const int threads = std::max<int64_t>(1, std::min<int64_t>(most, weights / 32768));
#pragma omp parallel num_threads(threads) if (threads > 1)
  f(Team{omp_get_thread_num(), omp_get_num_threads()});
}

// ---------------------------------------------------------------------------- linear layers

static const int64_t BLOCK = 32;  // weights taken at a time: one or two lines of cache

// Sixteen weights as two vectors. Two bfloat16 share a word, so a shift and a mask give the even
// and the odd ones; `arrange` puts x into the same order.
static inline void pair(const float* p, vec& a, vec& b) {
  a = load(p);
  b = load(p + 8);
}

static inline void pair(const at::BFloat16* p, vec& a, vec& b) {
  words w;
  __builtin_memcpy(&w, p, 32);
  words even = w << 16, odd = w & 0xffff0000u;
  __builtin_memcpy(&a, &even, 32);
  __builtin_memcpy(&b, &odd, 32);
}

// x (rows, K) in that order: itself, or a copy in `mine`.
template <typename T>
static const float* arrange(const float* x, int64_t rows, int64_t K, float* mine) {
  if (std::is_same<T, float>::value) return x;
  const int64_t whole = K / BLOCK * BLOCK;
  for (int64_t m = 0; m < rows; m++, x += K, mine += K) {
    for (int64_t k = 0; k < whole; k += 16)
      for (int i = 0; i < 8; i++) {
        mine[k + i] = x[k + 2 * i];
        mine[k + 8 + i] = x[k + 2 * i + 1];
      }
    std::copy(x + whole, x + K, mine + whole);
  }
  return mine - rows * K;
}

// A linear layer, as it lies in memory.
template <typename T>
struct Linear {
  const T* w = nullptr;  // N K
  const T* bias = nullptr;  // N, or none
  int64_t N = 0, K = 0;

  Linear() = default;
  Linear(const at::Tensor& weight, const std::optional<at::Tensor>& b)
      : w(weight.const_data_ptr<T>()),
        bias(b ? b->const_data_ptr<T>() : nullptr),
        N(weight.size(0)),
        K(weight.size(1)) {}
};

// Outputs n … n+R-1 of M rows, added to y or written there: a row of w is used for all of them while
// it is in registers. Each has U partial sums, so that one addition does not wait for the other.
template <typename T, int M, int R, int U>
static void outputs(
    const float* x, const Linear<T>& layer, float* y, bool added, int64_t n, const T* ahead) {
  const int64_t K = layer.K, N = layer.N;
  const T* w = layer.w;
  vec acc[R][M][U] = {};
  const int64_t whole = K / BLOCK * BLOCK;
  for (int64_t k = 0; k < whole; k += BLOCK)
#pragma GCC unroll 4
    for (int r = 0; r < R; r++) {
      const T* p = w + (n + r) * K + k;
#pragma GCC unroll 2
      for (int64_t line = 0; line < BLOCK; line += 64 / sizeof(T))
        __builtin_prefetch(ahead + r * K + k + line);
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        vec a, b;
        pair(p + 16 * half, a, b);
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) {
          acc[r][m][2 * half % U] += a * load(x + m * K + k + 16 * half);
          acc[r][m][(2 * half + 1) % U] += b * load(x + m * K + k + 16 * half + 8);
        }
      }
    }
  for (int r = 0; r < R; r++)
    for (int m = 0; m < M; m++) {
      vec all = acc[r][m][0];
      for (int u = 1; u < U; u++) all += acc[r][m][u];
      float s = sum(all);
      for (int64_t k = whole; k < K; k++) s += float(w[(n + r) * K + k]) * x[m * K + k];
      float& to = y[m * N + n + r];
      to = s + (layer.bias ? float(layer.bias[n + r]) : 0.f) + (added ? to : 0.f);
    }
}

// A thread's outputs of all rows. Its part of w ends before `next` begins, which is what it reads
// afterwards: it goes on to ask for its part there.
template <typename T, int R, int U>
static void share_of_product(
    const float* x, int64_t rows, const Linear<T>& layer, float* y, bool added,
    const Linear<T>& next, const Team& team) {
  const int64_t K = layer.K, far = AHEAD / int64_t(sizeof(T)), near = R == 1 ? NEAR : far;
  const auto [from, to] = team.share(layer.N);
  const T* then = next.w ? next.w + team.share(next.N).from * next.K : layer.w;
  auto all_rows = [&](auto count, int64_t n, const T* ahead) {
    constexpr int C = decltype(count)::value;
    for (int64_t m = 0; m < rows; m += 4) {
      const float* px = x + m * K;
      float* py = y + m * layer.N;
      switch (rows - m) {
        case 1: outputs<T, 1, C, U>(px, layer, py, added, n, ahead); break;
        case 2: outputs<T, 2, C, U>(px, layer, py, added, n, ahead); break;
        case 3: outputs<T, 3, C, U>(px, layer, py, added, n, ahead); break;
        default: outputs<T, 4, C, U>(px, layer, py, added, n, ahead);
      }
    }
  };
  int64_t n = from;
  for (; n + R <= to; n += R) {
    const int64_t beyond = (n - to) * K + far;
    all_rows(std::integral_constant<int, R>(), n, beyond < 0 ? layer.w + n * K + near : then + beyond);
  }
  for (; n < to; n++) all_rows(std::integral_constant<int, 1>(), n, layer.w + n * K);
}

template <typename T>
static void product(
    const float* x, int64_t rows, const Linear<T>& layer, float* y, bool added,
    const Linear<T>& next, const Team& team) {
  if (rows > 2)  // R·M·U sums in registers
    share_of_product<T, 2, 1>(x, rows, layer, y, added, next, team);
  else if (sizeof(T) == 2)
    share_of_product<T, 1, 2>(x, rows, layer, y, added, next, team);
  else
    share_of_product<T, 4, 1>(x, rows, layer, y, added, next, team);
}

// Runs f<float> or f<BFloat16> by the type of the weights.
#define BY_TYPE(weight, ...)                                                            \
  [&] {                                                                                 \
    TORCH_CHECK((weight).is_contiguous(), "spiralformer: weights must be contiguous");  \
    if ((weight).scalar_type() == at::kFloat) {                                         \
      using T = float;                                                                  \
      return __VA_ARGS__();                                                             \
    }                                                                                   \
    TORCH_CHECK(                                                                        \
        (weight).scalar_type() == at::kBFloat16,                                        \
        "spiralformer: weights must be float32 or bfloat16, not ", (weight).scalar_type()); \
    using T = at::BFloat16;                                                             \
    return __VA_ARGS__();                                                               \
  }()

static at::Tensor as_rows(const at::Tensor& x) {
  if (x.dim() == 2 && x.scalar_type() == at::kFloat && x.is_contiguous()) return x;
  return x.reshape({-1, x.size(-1)}).to(at::kFloat).contiguous();
}

at::Tensor few_rows(const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias) {
  TORCH_CHECK(x.scalar_type() == w.scalar_type(), "few_rows: x and weight differ in dtype");
  TORCH_CHECK(x.size(-1) == w.size(1), "few_rows: x and weight differ in width");
  const at::Tensor from = as_rows(x);
  const int64_t rows = from.size(0);
  auto shape = x.sizes().vec();
  shape.back() = w.size(0);
  at::Tensor y = at::empty({rows, w.size(0)}, from.options());
  BY_TYPE(w, [&] {
    const Linear<T> layer(w, bias);
    std::vector<float> buffer(rows * layer.K);
    const float* px = arrange<T>(from.const_data_ptr<float>(), rows, layer.K, buffer.data());
    float* py = y.mutable_data_ptr<float>();
    together(w.numel(), [&](const Team& team) {
      product<T>(px, rows, layer, py, false, Linear<T>(), team);
    });
  });
  return y.to(x.scalar_type()).view(shape);
}

// ---------------------------------------------------------------------------- a stack of blocks

template <typename T>
struct Norm {
  const T* w;
  const T* bias;  // RMSNorm has none
  float eps;

  Norm(const at::Tensor& weight, const std::optional<at::Tensor>& b, double eps)
      : w(weight.const_data_ptr<T>()), bias(b ? b->const_data_ptr<T>() : nullptr), eps(eps) {}

  void operator()(const float* from, float* to, int64_t rows, int64_t D) const {
    for (int64_t m = 0; m < rows; m++, from += D, to += D) {
      float mean = 0;
      if (bias) {
        for (int64_t i = 0; i < D; i++) mean += from[i];
        mean /= D;
      }
      for (int64_t i = 0; i < D; i++) to[i] = from[i] - mean;
      const float scale = 1 / std::sqrt(dot(to, to, D) / D + eps);
      for (int64_t i = 0; i < D; i++) to[i] = to[i] * scale * float(w[i]);
      if (bias)
        for (int64_t i = 0; i < D; i++) to[i] += float(bias[i]);
    }
  }
};

// The first 2·half dimensions of a head, half against half; `rope` has cosines, then sines.
static void rotate(float* x, const float* rope, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half], c = rope[i], s = rope[i + half];
    x[i] = a * c - b * s;
    x[i + half] = b * c + a * s;
  }
}

// Where the next entry of a row goes, in the keys and values of its group.
template <typename T>
struct Place {
  T* keys;  // of the first layer and head
  T* values;
  int64_t position, capacity;
  int64_t layer_stride;
};

// Stores the new key and value of each row and attends to all it has: a thread's share of the heads.
template <typename T>
static void attend(
    float* qkv, const std::vector<float>& rope, const std::vector<Place<T>>& places, int64_t layer,
    int64_t H, int64_t K, float* out, const Team& team) {
  const int64_t half = rope.size() / places.size() / 2;
  const float scale = 1 / std::sqrt(float(K));
  std::vector<float> scores;
  const auto [from, to] = team.share(places.size() * H, 1);
  for (int64_t i = from; i < to; i++) {
    const int64_t p = i / H, head = i % H;
    const Place<T>& place = places[p];
    const int64_t base = layer * place.layer_stride + head * place.capacity * K;
    T* k = place.keys + base;
    T* v = place.values + base;
    float* q = qkv + (3 * p * H + head) * K;
    float* new_k = q + H * K;
    float* new_v = new_k + H * K;
    rotate(q, rope.data() + 2 * p * half, half);
    rotate(new_k, rope.data() + 2 * p * half, half);
    for (int64_t j = 0; j < K; j++) {
      k[place.position * K + j] = T(new_k[j]);
      v[place.position * K + j] = T(new_v[j]);
    }
    const int64_t count = place.position + 1;
    scores.resize(count);
    for (int64_t j = 0; j < count; j++) scores[j] = scale * dot(q, k + j * K, K);
    softmax(scores.data(), count);
    float* y = out + (p * H + head) * K;
    std::fill_n(y, K, 0.f);
    for (int64_t j = 0; j < count; j++) add(y, scores[j], v + j * K, K);
  }
}

template <typename T>
struct Layer {
  Norm<T> attention_norm, mlp_norm;
  Linear<T> qkv, out, up, down;
};

// One token of every row, h (P, D), through GPT-NeoX blocks, in place.
template <typename T>
static void run_stack(
    const std::vector<Layer<T>>& layers, float* h, const std::vector<Place<T>>& places,
    const at::Tensor& frequencies, int64_t H, bool parallel) {
  const int64_t P = places.size();
  if (layers.empty() || !P) return;
  const int64_t D = layers[0].qkv.K, wide = layers[0].up.N;
  const float* angle = frequencies.const_data_ptr<float>();
  std::vector<float> rope;  // of each row, cosines, then sines
  for (const Place<T>& place : places)
    for (auto turn : {+[](float a) { return std::cos(a); }, +[](float a) { return std::sin(a); }})
      for (int64_t i = 0; i < frequencies.numel(); i++)
        rope.push_back(turn(float(place.position) * angle[i]));
  std::vector<float> buffer(P * (4 * D + wide));
  float* qkv = buffer.data();
  float* found = qkv + 3 * P * D;
  float* up = found + P * D;
  together(layers[0].up.N * D, [&](const Team& team) {
    std::vector<float> normed(P * D), mine(P * std::max(D, wide));
    auto arranged = [&](const float* from, int64_t width) {
      return arrange<T>(from, P, width, mine.data());
    };
    for (size_t i = 0; i < layers.size(); i++) {
      const Layer<T>& layer = layers[i];
      const Linear<T> after = i + 1 < layers.size() ? layers[i + 1].qkv : Linear<T>();
      auto mlp_up = [&](const Linear<T>& next) {
        layer.mlp_norm(h, normed.data(), P, D);
        product<T>(arranged(normed.data(), D), P, layer.up, up, false, next, team);
        const auto [from, to] = team.share(wide);
        for (int64_t p = 0; p < P; p++) gelu(up + p * wide + from, to - from);
      };
      layer.attention_norm(h, normed.data(), P, D);
      const Linear<T>& second = parallel ? layer.up : layer.out;
      product<T>(arranged(normed.data(), D), P, layer.qkv, qkv, false, second, team);
      if (parallel) mlp_up(layer.out);
      team.wait();
      attend<T>(qkv, rope, places, i, H, D / H, found, team);
      team.wait();
      const Linear<T>& third = parallel ? layer.down : layer.up;
      product<T>(arranged(found, D), P, layer.out, h, true, third, team);
      if (!parallel) {
        team.wait();
        mlp_up(layer.down);
        team.wait();
      }
      product<T>(arranged(up, wide), P, layer.down, h, true, after, team);
      team.wait();
    }
  });
}

// ---------------------------------------------------------------------------- around the core

using Rows = std::vector<float>;  // P D

// The geometry of an iteration, as in the configuration, and which stack is its core.
struct Iteration {
  int64_t chunk, offset, shift, core;

  int64_t chunks(int64_t length) const { return (length + offset) / chunk; }
  int64_t chunk_of(int64_t position) const { return (position + offset) / chunk; }
  int64_t phase_of(int64_t position) const { return (position + offset) % chunk; }
  bool ends(int64_t position) const { return phase_of(position) == chunk - 1; }
  bool lags() const { return shift >= chunk; }
};

template <typename T>
static T* data(const at::Tensor& t) {
  TORCH_CHECK(t.is_contiguous(), "spiralformer: a state must be contiguous");
  return t.numel() ? t.mutable_data_ptr<T>() : nullptr;
}

// What is remembered of an iteration beside its keys and values, as it lies in memory.
template <typename T>
struct Part {
  float *total, *peak, *weight;  // the unfinished chunk; no peak, no weight with mean pooling
  T *latents, *allocations, *recent;  // B W D, B W G, B R D
  int64_t W, R;

  explicit Part(const std::vector<at::Tensor>& t, size_t i)
      : total(data<float>(t[i])),
        peak(data<float>(t[i + 1])),
        weight(data<float>(t[i + 2])),
        latents(data<T>(t[i + 3])),
        allocations(data<T>(t[i + 4])),
        recent(data<T>(t[i + 5])),
        W(t[i + 3].size(1)),
        R(t[i + 5].size(1)) {}
};

// The oldest of `count` entries of n numbers leaves; returns the place of the newest.
template <typename T>
static T* push(T* entries, int64_t count, int64_t n) {
  std::copy(entries + n, entries + count * n, entries);
  return entries + (count - 1) * n;
}

// The state x (D) of row p joins its unfinished chunk: a step of the online softmax, or of the sum
// where nothing is scored.
template <typename T>
static void join(const Part<T>& part, const Linear<T>& scorer, int64_t p, const float* x, int64_t D) {
  float* total = part.total + p * D;
  if (!scorer.w) return add(total, 1.f, x, D);
  const float score = dot(x, scorer.w, D), peak = std::max(part.peak[p], score);
  const float fade = std::exp(part.peak[p] - peak), share = std::exp(score - peak);
  for (int64_t i = 0; i < D; i++) total[i] *= fade;
  add(total, share, x, D);
  part.weight[p] = part.weight[p] * fade + share;
  part.peak[p] = peak;
}

// The latent of the finished chunk of row p goes to z (D), and a new chunk starts.
template <typename T>
static void finish(const Part<T>& part, int64_t chunk, int64_t p, float* z, int64_t D, float floor) {
  float* total = part.total + p * D;
  const float over = part.weight ? part.weight[p] : float(chunk);
  for (int64_t i = 0; i < D; i++) z[i] = total[i] / over;
  std::fill_n(total, D, 0.f);
  if (part.weight) {
    part.weight[p] = 0;
    part.peak[p] = floor;
  }
}

// The newest latent z (D) of row p enters its ring; how it is spread over its chunk, λ·β, is what
// the router says, or the same everywhere.
template <typename T>
static void hold(
    const Part<T>& part, const Linear<T>& router, int64_t chunk, int64_t p, const float* z, int64_t D) {
  const int64_t W = part.W;
  std::copy_n(z, D, push(part.latents + p * W * D, W, D));
  T* spread = push(part.allocations + p * W * chunk, W, chunk);
  if (!router.w) return void(std::fill_n(spread, chunk, T(1 / std::sqrt(float(chunk)))));
  Rows share(chunk);
  for (int64_t g = 0; g < chunk; g++)
    share[g] = dot(z, router.w + g * D, D) + float(router.bias[g]);
  softmax(share.data(), chunk);
  for (int64_t g = 0; g < chunk; g++) spread[g] = T(share[g] * std::sqrt(float(chunk)));
}

// The update of token `position` of row p to u (D): the latent of chunk π(i-s) by its allocation.
// The ring ends before chunk `end`.
template <typename T>
static void read(
    const Part<T>& part, const Iteration& it, int64_t p, int64_t position, int64_t end, float* u,
    int64_t D) {
  const int64_t token = position - it.shift;
  const int64_t at = token < 0 ? -1 : it.chunk_of(token) - end + part.W;
  if (at < 0) return void(std::fill_n(u, D, 0.f));
  TORCH_CHECK(at < part.W, "spiralformer: no latent ", at, " of ", part.W);
  const T* latent = part.latents + (p * part.W + at) * D;
  const float share = part.allocations[(p * part.W + at) * it.chunk + it.phase_of(token)];
  for (int64_t i = 0; i < D; i++) u[i] = float(latent[i]) * share;
}

// How updates enter the state (model/topology.py): `update` replaces h.
template <typename T>
struct Topology {
  bool anchored;  // else the update is the next state
  std::vector<Linear<T>> routers;  // if there are any, MeSH
  const Rows& x;
  std::vector<Rows> updates, writes;

  void update(Rows& h, Rows u) {
    if (routers.empty()) {
      if (anchored && !updates.empty()) add(u.data(), 1.f, updates[0].data(), u.size());
      if (anchored && updates.empty()) updates.push_back(u);
      h = std::move(u);
      return;
    }
    const Linear<T>& router = routers[updates.size()];
    const int64_t D = router.K, P = h.size() / D, M = router.N / 2;
    updates.push_back(std::move(u));
    writes.emplace_back(P * M);
    Rows logits(2 * M);
    const float* write = logits.data();
    const float* read = write + M;
    for (int64_t p = 0; p < P; p++) {
      float* y = h.data() + p * D;
      for (int64_t i = 0; i < 2 * M; i++)
        logits[i] = dot(y, router.w + i * D, D) + float(router.bias[i]);
      softmax(logits.data(), M);
      softmax(logits.data() + M, M);
      std::copy_n(write, M, writes.back().data() + p * M);
      std::fill_n(y, D, 0.f);
      add(y, read[0], x.data() + p * D, D);
      for (size_t k = 0; k < updates.size(); k++)
        add(y, dot(writes[k].data() + p * M, read, M), updates[k].data() + p * D, D);
    }
  }
};

// ---------------------------------------------------------------------------- a whole token

using Weights = c10::List<std::optional<at::Tensor>>;  // weight and bias of each layer, in turn

template <typename T>
static Linear<T> linear(const Weights& weights, size_t i) {
  const std::optional<at::Tensor> w = weights.get(2 * i);
  return w ? Linear<T>(*w, weights.get(2 * i + 1)) : Linear<T>();
}

// A model, ready to be run one token at a time.
struct Decoder : torch::CustomClassHolder {
  at::Tensor embedding, frequencies;
  double scale, eps, floor;
  int64_t heads;
  bool parallel, anchored;
  std::vector<int64_t> layers, geometry;
  Weights blocks, routers, scorers, spreads, norm;

  // `blocks` has those of attention_norm, qkv, out, mlp_norm, up and down of each layer; stack i has
  // layers[i] of them, f_pre first and f_post last. `geometry` has four numbers an iteration.
  Decoder(
      at::Tensor embedding, double scale, at::Tensor frequencies, int64_t heads, double eps,
      bool parallel, bool anchored, double floor, std::vector<int64_t> layers,
      std::vector<int64_t> geometry, Weights blocks, Weights routers, Weights scorers,
      Weights spreads, Weights norm)
      : embedding(embedding), frequencies(frequencies), scale(scale), eps(eps), floor(floor),
        heads(heads), parallel(parallel), anchored(anchored), layers(layers), geometry(geometry),
        blocks(blocks), routers(routers), scorers(scorers), spreads(spreads), norm(norm) {}

  // Advances every row of a state by one token; returns the output states (B, D). `keys` and `values`
  // are of f_pre, each iteration and f_post; `parts` has six tensors an iteration.
  at::Tensor token(
      const at::Tensor& ids, const std::vector<at::Tensor>& keys,
      const std::vector<at::Tensor>& values, const std::vector<at::Tensor>& parts,
      const std::vector<int64_t>& lengths) const {
    TORCH_CHECK(
        ids.numel() == int64_t(lengths.size()) && keys.size() == geometry.size() / 4 + 2 &&
            values.size() == keys.size() && parts.size() == geometry.size() / 4 * 6,
        "spiralformer: a state of another model");
    const at::Tensor tokens = ids.to(at::kLong).contiguous();
    return BY_TYPE(embedding, [&] { return run<T>(tokens, keys, values, parts, lengths); });
  }

  template <typename T>
  std::vector<std::vector<Layer<T>>> stacks() const {
    auto norm_at = [&](size_t i) {
      return Norm<T>(blocks.get(2 * i).value(), blocks.get(2 * i + 1), eps);
    };
    std::vector<std::vector<Layer<T>>> found;
    size_t at = 0;
    for (int64_t count : layers) {
      found.emplace_back();
      for (; count--; at += 6)
        found.back().push_back(
            {norm_at(at), norm_at(at + 3), linear<T>(blocks, at + 1), linear<T>(blocks, at + 2),
             linear<T>(blocks, at + 4), linear<T>(blocks, at + 5)});
    }
    return found;
  }

  template <typename T>
  at::Tensor run(
      const at::Tensor& ids, const std::vector<at::Tensor>& keys,
      const std::vector<at::Tensor>& values, const std::vector<at::Tensor>& parts,
      const std::vector<int64_t>& lengths) const {
    const int64_t B = lengths.size(), D = embedding.size(1), V = embedding.size(0);
    const auto all = stacks<T>();
    std::vector<Place<T>> places;
    auto place = [&](size_t cache, int64_t row, int64_t position) {
      const at::Tensor &k = keys[cache], &v = values[cache];
      TORCH_CHECK(
          k.is_contiguous() && v.is_contiguous() && row < k.size(1) && position < k.size(3),
          "spiralformer: entry ", position, " of row ", row, " is outside its cache");
      const int64_t offset = row * k.stride(1);
      places.push_back(
          {k.mutable_data_ptr<T>() + offset, v.mutable_data_ptr<T>() + offset, position, k.size(3),
           k.stride(0)});
    };
    auto through = [&](size_t stack, size_t cache, Rows& h) {  // all rows at full resolution
      places.clear();
      if (!all[stack].empty())
        for (int64_t p = 0; p < B; p++) place(cache, p, lengths[p]);
      run_stack<T>(all[stack], h.data(), places, frequencies, heads, parallel);
    };

    Rows x(B * D);
    for (int64_t p = 0; p < B; p++) {
      const int64_t id = ids.const_data_ptr<int64_t>()[p];
      TORCH_CHECK_INDEX(0 <= id && id < V, "token ", id, " is outside 0…", V - 1);
      add(x.data() + p * D, float(scale), embedding.const_data_ptr<T>() + id * D, D);
    }
    Rows h = x, v = x;
    through(0, 0, v);
    Topology<T> topology{anchored, {}, x, {}, {}};
    for (size_t i = 0; 2 * i < routers.size(); i++)
      topology.routers.push_back(linear<T>(routers, i));
    topology.update(h, std::move(v));

    std::vector<Iteration> its;
    for (size_t i = 0; i < geometry.size(); i += 4)
      its.push_back({geometry[i], geometry[i + 1], geometry[i + 2], geometry[i + 3]});
    for (size_t first = 0, last; first < its.size(); first = last) {
      // where an iteration lags, none waits for its pass: all that are due go through the core at once
      for (last = first + 1; last < its.size(); last++)
        if (!its[last - 1].lags() || its[last].core != its[first].core) break;
      Rows due;  // of each iteration, of each row whose chunk ends
      places.clear();
      auto enter = [&](size_t t, const Part<T>& part, const float* found) {
        Rows u(B * D);
        for (int64_t p = 0; p < B; p++) {
          if (its[t].chunk == 1 && !its[t].shift)
            std::copy_n(found + p * D, D, u.data() + p * D);
          else
            read(part, its[t], p, lengths[p], its[t].chunks(lengths[p] + !its[t].lags()),
                 u.data() + p * D, D);
        }
        topology.update(h, std::move(u));
      };
      for (size_t t = first; t < last; t++) {
        const Iteration& it = its[t];
        const Part<T> part(parts, 6 * t);
        const Linear<T> scorer = linear<T>(scorers, t);
        for (int64_t p = 0; p < B; p++) {
          const float* state = h.data() + p * D;
          if (part.R) std::copy_n(state, D, push(part.recent + p * part.R * D, part.R, D));
          if (it.chunk > 1) join(part, scorer, p, state, D);
          if (!it.ends(lengths[p])) continue;
          place(t + 1, p, it.chunks(lengths[p]));
          due.insert(due.end(), state, state + D);
          if (it.chunk > 1) finish(part, it.chunk, p, due.data() + due.size() - D, D, floor);
        }
        if (it.lags()) enter(t, part, nullptr);
      }
      run_stack<T>(all[1 + its[first].core], due.data(), places, frequencies, heads, parallel);
      const float* found = due.data();
      for (size_t t = first; t < last; t++) {
        const Part<T> part(parts, 6 * t);
        const Linear<T> router = linear<T>(spreads, t);
        const float* mine = found;
        for (int64_t p = 0; p < B; p++) {
          if (!its[t].ends(lengths[p])) continue;
          if (part.W) hold(part, router, its[t].chunk, p, found, D);
          found += D;
        }
        if (!its[t].lags()) enter(t, part, mine);
      }
    }
    through(all.size() - 1, keys.size() - 1, h);
    Norm<T>(norm.get(0).value(), norm.get(1), eps)(h.data(), h.data(), B, D);
    at::Tensor out = at::empty({B, D}, embedding.options());
    std::copy_n(h.data(), B * D, out.mutable_data_ptr<T>());
    return out;
  }
};

TORCH_LIBRARY(spiralformer, m) {
  m.def("few_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.class_<Decoder>("Decoder")
      .def(torch::init<
           at::Tensor, double, at::Tensor, int64_t, double, bool, bool, double,
           std::vector<int64_t>, std::vector<int64_t>, Weights, Weights, Weights, Weights, Weights>())
      .def("token", &Decoder::token);
}
TORCH_LIBRARY_IMPL(spiralformer, CPU, m) { m.impl("few_rows", few_rows); }
