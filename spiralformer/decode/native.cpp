// A decode step on a CPU, bound by reading the weights once. Float32 sums, whatever the weights' type.
//
// Shapes: P rows (of one or more groups), D width, H heads, K head size, C capacity, M memory slots.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

typedef float vec __attribute__((vector_size(32)));
typedef float vec4 __attribute__((vector_size(16)));
typedef uint32_t words __attribute__((vector_size(32)));
typedef uint16_t halves __attribute__((vector_size(16)));

static const int64_t AHEAD = 32768;  // bytes that are asked for before they are needed
static const int64_t MOST_ROWS = 16;  // above these, the general product does better

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
  float peak = *std::max_element(x, x + n), total = 0;
  for (int64_t i = 0; i < n; i++) total += x[i] = std::exp(x[i] - peak);
  for (int64_t i = 0; i < n; i++) x[i] /= total;
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

template <typename T>
static const float* arrange(const float* x, int64_t rows, int64_t K, std::vector<float>& buffer) {
  if (std::is_same<T, float>::value) return x;
  buffer.assign(x, x + rows * K);
  for (int64_t m = 0; m < rows; m++)
    for (int64_t k = m * K; k < m * K + K / BLOCK * BLOCK; k += 16)
      for (int i = 0; i < 8; i++) {
        buffer[k + i] = x[k + 2 * i];
        buffer[k + 8 + i] = x[k + 2 * i + 1];
      }
  return buffer.data();
}

// Outputs n … n+R-1 of M rows: a row of w is used for all of them while it is in registers. Each has
// U partial sums, so that one addition does not wait for the other.
template <typename T, int M, int R, int U>
static void outputs(
    const float* x, const T* w, const T* bias, float* y, int64_t K, int64_t N, int64_t n,
    const T* ahead) {
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
      y[m * N + n + r] = s + (bias ? float(bias[n + r]) : 0.f);
    }
}

// The part of w that a thread reads ends before `next` begins: it goes on to ask for its part there.
template <typename T, int M>
static void product(
    const float* x, const T* w, const T* bias, float* y, int64_t K, int64_t N, const T* next,
    int64_t next_size) {
  constexpr bool narrow = sizeof(T) == 2 && M <= 2;
  constexpr int R = narrow ? 1 : M <= 2 ? 4 : 2, U = narrow ? 4 : 1;  // R·M·U sums in registers
  const int64_t blocks = N / R, far = AHEAD / int64_t(sizeof(T));
  const int64_t grain = std::max<int64_t>(1, 32768 / std::max<int64_t>(1, K));
  at::parallel_for(0, blocks, grain, [&](int64_t from, int64_t to) {
    const T* then = next ? next + next_size * from / blocks : w;
    for (int64_t n = from * R; n < to * R; n += R) {
      const int64_t beyond = n * K + far - to * R * K;
      outputs<T, M, R, U>(x, w, bias, y, K, N, n, beyond < 0 ? w + n * K + far : then + beyond);
    }
  });
  for (int64_t n = blocks * R; n < N; n++) outputs<T, M, 1, U>(x, w, bias, y, K, N, n, w + n * K);
}

// x·wᵀ + b for float32 x (P, inputs); `next` is what will be read after w.
template <typename T>
static at::Tensor linear(
    const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias,
    const std::optional<at::Tensor>& next = std::nullopt) {
  const int64_t rows = x.size(0), K = w.size(1), N = w.size(0);
  if (rows > MOST_ROWS) return at::linear(x.to(w.scalar_type()), w, bias).to(at::kFloat);
  at::Tensor y = at::empty({rows, N}, x.options());
  std::vector<float> buffer;
  const float* px = arrange<T>(x.const_data_ptr<float>(), rows, K, buffer);
  const T* pw = w.const_data_ptr<T>();
  const T* pb = bias ? bias->const_data_ptr<T>() : nullptr;
  float* py = y.mutable_data_ptr<float>();
  for (int64_t m = 0; m < rows; m += 4, px += 4 * K, py += 4 * N) {
    const bool last = m + 4 >= rows && next;
    const T* pn = last ? next->const_data_ptr<T>() : nullptr;
    const int64_t size = last ? next->numel() : 0;
    switch (rows - m) {
      case 1: product<T, 1>(px, pw, pb, py, K, N, pn, size); break;
      case 2: product<T, 2>(px, pw, pb, py, K, N, pn, size); break;
      case 3: product<T, 3>(px, pw, pb, py, K, N, pn, size); break;
      default: product<T, 4>(px, pw, pb, py, K, N, pn, size);
    }
  }
  return y;
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
  auto shape = x.sizes().vec();
  shape.back() = w.size(0);
  at::Tensor y = BY_TYPE(w, [&] { return linear<T>(as_rows(x), w, bias); });
  return y.to(x.scalar_type()).view(shape);
}

// ---------------------------------------------------------------------------- a stack of blocks

template <typename T>
static at::Tensor norm(
    const at::Tensor& x, const at::Tensor& w, const std::optional<at::Tensor>& bias, double eps) {
  const int64_t rows = x.size(0), D = x.size(1);
  at::Tensor y = at::empty_like(x);
  const T* pw = w.const_data_ptr<T>();
  const T* pb = bias ? bias->const_data_ptr<T>() : nullptr;
  for (int64_t m = 0; m < rows; m++) {
    const float* from = x.const_data_ptr<float>() + m * D;
    float* to = y.mutable_data_ptr<float>() + m * D;
    float mean = 0;
    if (pb) {  // LayerNorm; RMSNorm has no bias
      for (int64_t i = 0; i < D; i++) mean += from[i];
      mean /= D;
    }
    for (int64_t i = 0; i < D; i++) to[i] = from[i] - mean;
    const float scale = 1 / std::sqrt(dot(to, to, D) / D + float(eps));
    for (int64_t i = 0; i < D; i++) to[i] = to[i] * scale * float(pw[i]) + (pb ? float(pb[i]) : 0.f);
  }
  return y;
}

// The first 2·half dimensions of a head, half against half; `rope` has cosines, then sines.
static void rotate(float* x, const float* rope, int64_t half) {
  for (int64_t i = 0; i < half; i++) {
    const float a = x[i], b = x[i + half], c = rope[i], s = rope[i + half];
    x[i] = a * c - b * s;
    x[i + half] = b * c + a * s;
  }
}

struct Place {
  int64_t group, row, position;  // whose cache, which row of it, how many entries it has
};

// Stores the new key and value of each row and attends to all it has.
template <typename T>
static at::Tensor attend(
    at::Tensor& qkv, const std::vector<float>& rope, const std::vector<Place>& places,
    const at::TensorList keys, const at::TensorList values, int64_t layer) {
  const int64_t P = qkv.size(0), H = keys[0].size(2), K = keys[0].size(4);
  at::Tensor out = at::zeros({P, H * K}, qkv.options());
  float* pqkv = qkv.mutable_data_ptr<float>();
  float* pout = out.mutable_data_ptr<float>();
  const int64_t half = rope.size() / P / 2;
  const float scale = 1 / std::sqrt(float(K));
  at::parallel_for(0, P * H, 1, [&](int64_t from, int64_t to) {
    std::vector<float> scores;
    for (int64_t i = from; i < to; i++) {
      const int64_t p = i / H, head = i % H;
      const Place& place = places[p];
      const int64_t count = place.position + 1, C = keys[place.group].size(3);
      const int64_t base = ((layer * keys[place.group].size(1) + place.row) * H + head) * C * K;
      T* k = keys[place.group].mutable_data_ptr<T>() + base;
      T* v = values[place.group].mutable_data_ptr<T>() + base;
      float* q = pqkv + (3 * p * H + head) * K;
      float* new_k = q + H * K;
      float* new_v = new_k + H * K;
      rotate(q, rope.data() + 2 * p * half, half);
      rotate(new_k, rope.data() + 2 * p * half, half);
      for (int64_t j = 0; j < K; j++) {
        k[place.position * K + j] = T(new_k[j]);
        v[place.position * K + j] = T(new_v[j]);
      }
      scores.resize(count);
      for (int64_t j = 0; j < count; j++) scores[j] = scale * dot(q, k + j * K, K);
      softmax(scores.data(), count);
      float* y = pout + (p * H + head) * K;
      for (int64_t j = 0; j < count; j++) add(y, scores[j], v + j * K, K);
    }
  });
  return out;
}

// One token of every row through GPT-NeoX blocks. `weights` has twelve entries a layer: weight and
// bias of attention_norm, qkv, out, mlp_norm, up and down. `places` has three numbers a row.
at::Tensor stack(
    const at::Tensor& x, const c10::List<std::optional<at::Tensor>>& weights, double eps,
    bool parallel, const at::Tensor& frequencies, const at::TensorList keys,
    const at::TensorList values, const at::IntArrayRef places) {
  std::vector<Place> where;
  for (size_t i = 0; i < places.size(); i += 3)
    where.push_back({places[i], places[i + 1], places[i + 2]});
  for (const Place& place : where) {
    const at::Tensor& cache = keys[place.group];
    TORCH_CHECK(
        cache.is_contiguous() && values[place.group].is_contiguous() &&
            place.row < cache.size(1) && place.position < cache.size(3),
        "spiralformer: entry ", place.position, " of row ", place.row, " is outside its cache");
  }
  std::vector<float> rope;
  const float* angle = frequencies.const_data_ptr<float>();
  for (const Place& place : where) {
    for (int64_t i = 0; i < frequencies.numel(); i++)
      rope.push_back(std::cos(float(place.position) * angle[i]));
    for (int64_t i = 0; i < frequencies.numel(); i++)
      rope.push_back(std::sin(float(place.position) * angle[i]));
  }
  at::Tensor h = as_rows(x);
  TORCH_CHECK(h.size(0) == int64_t(where.size()), "spiralformer: as many places as rows");
  BY_TYPE(weights.get(0).value(), [&] {
    for (size_t layer = 0; 12 * layer < weights.size(); layer++) {
      auto w = [&](int i) { return weights.get(12 * layer + 2 * i).value(); };
      auto b = [&](int i) { return weights.get(12 * layer + 2 * i + 1); };
      const bool last = 12 * (layer + 1) == weights.size();
      at::Tensor qkv = linear<T>(norm<T>(h, w(0), b(0), eps), w(1), b(1), w(2));
      at::Tensor found = attend<T>(qkv, rope, where, keys, values, layer);
      at::Tensor next = linear<T>(found, w(2), b(2), w(4)).add_(h);
      at::Tensor up = linear<T>(norm<T>(parallel ? h : next, w(3), b(3), eps), w(4), b(4), w(5));
      h = linear<T>(at::gelu_(up), w(5), b(5), last ? std::nullopt : weights.get(12 * layer + 14))
              .add_(next);
    }
  });
  return h.to(x.scalar_type()).view(x.sizes());
}

// ---------------------------------------------------------------------------- the small operators

template <typename T>
static std::vector<const T*> pointers(
    const at::TensorList given, const at::Tensor& last, std::vector<at::Tensor>& held) {
  std::vector<const T*> found;
  for (const at::Tensor& t : given) held.push_back(t.contiguous());
  held.push_back(last.contiguous());
  for (size_t i = held.size() - given.size() - 1; i < held.size(); i++)
    found.push_back(held[i].const_data_ptr<T>());
  return found;
}

// MeSH: where the update u goes (write), and the next state, a sum over x and all updates.
std::tuple<at::Tensor, at::Tensor> mesh(
    const at::Tensor& h, const at::Tensor& u, const at::Tensor& x, const at::TensorList updates,
    const at::TensorList writes, const at::Tensor& router, const at::Tensor& bias) {
  const int64_t D = h.size(-1), P = h.numel() / D, M = router.size(0) / 2;
  auto shape = h.sizes().vec();
  shape.back() = M;
  at::Tensor write = at::empty(shape, h.options()), state = at::empty(h.sizes(), h.options());
  const at::Tensor from = h.contiguous(), first = x.contiguous();
  BY_TYPE(router, [&] {
    std::vector<at::Tensor> held;
    const auto values = pointers<T>(updates, u, held), shares = pointers<T>(writes, write, held);
    std::vector<float> logits(2 * M), share(M), y(D);
    const T* w = router.const_data_ptr<T>();
    const T* b = bias.const_data_ptr<T>();
    for (int64_t p = 0; p < P; p++) {
      for (int64_t i = 0; i < 2 * M; i++)
        logits[i] = dot(from.const_data_ptr<T>() + p * D, w + i * D, D) + float(b[i]);
      softmax(logits.data(), M);
      softmax(logits.data() + M, M);
      const float* read = logits.data() + M;
      std::copy_n(logits.data(), M, write.mutable_data_ptr<T>() + p * M);
      std::fill(y.begin(), y.end(), 0.f);
      add(y.data(), read[0], first.const_data_ptr<T>() + p * D, D);
      for (size_t k = 0; k < values.size(); k++)
        add(y.data(), dot(shares[k] + p * M, read, M), values[k] + p * D, D);
      std::copy_n(y.data(), D, state.mutable_data_ptr<T>() + p * D);
    }
  });
  return {state, write};
}

// One iteration's update of a decoded token, and MeSH after it: the update is latent `at` times its
// allocation to place `phase` of its chunk.
std::tuple<at::Tensor, at::Tensor, at::Tensor> fold(
    const at::Tensor& latents, const at::Tensor& allocations, int64_t at, int64_t phase,
    const at::Tensor& h, const at::Tensor& x, const at::TensorList updates,
    const at::TensorList writes, const at::Tensor& router, const at::Tensor& bias) {
  at::Tensor u = latents.narrow(1, at, 1) * allocations.narrow(1, at, 1).narrow(2, phase, 1);
  auto [state, write] = mesh(h, u, x, updates, writes, router, bias);
  return {u, state, write};
}

// One step of the online softmax of self-aggregation: h (P, 1, D) joins each row's unfinished
// chunk. The chunks of the rows `ended` are complete: returns their latents and starts anew.
at::Tensor join(
    const at::Tensor& h, const at::Tensor& scorer, at::Tensor total, at::Tensor peak,
    at::Tensor weight, const at::IntArrayRef ended, double floor) {
  const int64_t D = h.size(-1), P = h.numel() / D;
  const at::Tensor from = h.contiguous();
  TORCH_CHECK(total.is_contiguous(), "spiralformer: a state must be contiguous");
  at::Tensor latents = at::empty({int64_t(ended.size()), 1, D}, h.options());
  float* sums = total.mutable_data_ptr<float>();
  float* peaks = peak.mutable_data_ptr<float>();
  float* weights = weight.mutable_data_ptr<float>();
  BY_TYPE(scorer, [&] {
    for (int64_t p = 0; p < P; p++) {
      const T* x = from.const_data_ptr<T>() + p * D;
      const float score = dot(x, scorer.const_data_ptr<T>(), D), next = std::max(peaks[p], score);
      const float fade = std::exp(peaks[p] - next), share = std::exp(score - next);
      for (int64_t i = p * D; i < (p + 1) * D; i++) sums[i] *= fade;
      add(sums + p * D, share, x, D);
      weights[p] = weights[p] * fade + share;
      peaks[p] = next;
    }
    T* out = latents.mutable_data_ptr<T>();
    for (int64_t p : ended) {
      for (int64_t i = p * D; i < (p + 1) * D; i++) *out++ = T(sums[i] / weights[p]);
      std::fill_n(sums + p * D, D, 0.f);
      weights[p] = 0;
      peaks[p] = floor;
    }
  });
  return latents;
}

// λ·β of each latent (…, D): how its update is spread over its chunk.
at::Tensor allocate(
    const at::Tensor& latents, const at::Tensor& router, const at::Tensor& bias, double gain) {
  at::Tensor found = few_rows(latents, router, bias).to(at::kFloat);
  const int64_t G = router.size(0);
  float* y = found.mutable_data_ptr<float>();
  for (int64_t i = 0; i < found.numel(); i += G) softmax(y + i, G);
  return found.mul_(gain).to(latents.scalar_type());
}

TORCH_LIBRARY(spiralformer, m) {
  m.def("few_rows(Tensor x, Tensor weight, Tensor? bias) -> Tensor");
  m.def(
      "stack(Tensor x, Tensor?[] weights, float eps, bool parallel, Tensor frequencies, "
      "Tensor(a!)[] keys, Tensor(b!)[] values, int[] places) -> Tensor");
  m.def(
      "mesh(Tensor h, Tensor u, Tensor x, Tensor[] updates, Tensor[] writes, Tensor router, "
      "Tensor bias) -> (Tensor, Tensor)");
  m.def(
      "fold(Tensor latents, Tensor allocations, int at, int phase, Tensor h, Tensor x, "
      "Tensor[] updates, Tensor[] writes, Tensor router, Tensor bias) -> (Tensor, Tensor, Tensor)");
  m.def(
      "join(Tensor h, Tensor scorer, Tensor(a!) total, Tensor(b!) peak, Tensor(c!) weight, "
      "int[] ended, float floor) -> Tensor");
  m.def("allocate(Tensor latents, Tensor router, Tensor bias, float gain) -> Tensor");
}
TORCH_LIBRARY_IMPL(spiralformer, CPU, m) {
  m.impl("few_rows", few_rows);
  m.impl("stack", stack);
  m.impl("mesh", mesh);
  m.impl("fold", fold);
  m.impl("join", join);
  m.impl("allocate", allocate);
}
