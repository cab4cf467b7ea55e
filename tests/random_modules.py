"""Random modules for the symmetry tests: ordinary torch code, made from a seed.

Building a module is writing its source and executing it, so that what is tested, what is printed in a failure and what a
user would write are the same text. The generator keeps a pool of values, computed as it goes: what does not fit their
shapes raises, and another operator is drawn. Some operators *plant* a hidden layer that nothing else can touch:
``Module.planted`` names those that an output depends on, a lower bound on what has to be found.

An operator of the table is a line ``name weight axes words`` and its programs, each on a line (indented further where it
goes on) or behind a ``|``. In a program ``x`` is a value with one of these numbers of axes, ``y`` another one (``same``: of
its shape; ``rows``: which differs in the number of features only), ``r`` and ``other`` are results, ``;`` ends a line,
``{a | b}`` is a choice, and ``@name`` a program of the lists. Capitals are the numbers of ``SYMBOLS``. Behind ``<-`` stand
the parts that are read: ``l=(N, O)`` is a linear layer, ``p=[N]`` a parameter, ``m=~...`` a buffer; ``self.AGAIN`` is a
linear layer of earlier that takes N features, ``self.BACK`` one that gives them.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from written import executed

IMPORTS = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"

PROGRAMS = """
plain
    torch.relu(z) | torch.relu(z) | F.relu(z) | torch.tanh(z) | F.gelu(z) | F.leaky_relu(z, 0.1) | torch.sigmoid(z) | z.abs()
act
    @plain | torch.sin(z) | F.silu(z) | F.elu(z) | F.hardtanh(z) | F.relu6(z) | z ** 2 | z * z | torch.relu(z) ** 2 | -z
    @plain | 2.0 * z | z / 3 | z.clamp(min=0) | z.clamp(-1, 1) | F.softplus(z) | torch.exp(-z.abs()) | (z.abs() + 1e-6).sqrt()
    @plain | torch.atan(z) | z.sign() * z | F.dropout(z, 0.5, self.training) | z.clone() | z.detach() | z.contiguous()
    F.mish(z) | torch.where(z > 0, z, 0.3 * z) | F.threshold(z, 0.0, 0.0) | z.float() | torch.square(z) | 1 - z | z + 1
    z + (torch.relu(z) - z).detach() | z * 0.5 - 0.1 | torch.clamp(z, min=1e-6) | F.hardswish(z) | torch.nan_to_num(z)
    torch.addcmul(z, z, z, value=0.5) | torch.lerp(z, torch.relu(z), 0.3) | z.masked_fill(z < 0, 0.0) | z * (z > 0)
    torch.logit(z.sigmoid() * 0.9 + 0.05)
met
    x * c | x + c | c + x | torch.where(c > 0, x, torch.relu(x)) | x * c + c
sum
    a | a + b | b + a | torch.relu(a + b) | a * b | a - b | torch.maximum(a, b)
norm
    q, k = q, k; | q, k = q, k; | q, k = F.layer_norm(q, (U,)), F.layer_norm(k, (U,)); | q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1);
    q, k = F.rms_norm(q, (U,)), F.rms_norm(k, (U,)); | q, k = self.n(q), self.n(k); | q, k = torch.relu(q), torch.relu(k); | q = q * self.p;
mixed
    F.scaled_dot_product_attention(q, k, v{ | , is_causal=True}) | ((q @ k.transpose(-1, -2)) * U ** -0.5).softmax(-1) @ v
    torch.einsum('bhij,bhjd->bhid', torch.einsum('bhid,bhjd->bhij', q, k).softmax(-1), v)
    (q @ k.transpose(-1, -2)).masked_fill(torch.ones(S, S).triu(1).bool(), {float('-inf') | -1e9}).softmax(-1) @ v
    q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v) | F.normalize(torch.relu(q @ k.transpose(-1, -2)), 1, -1) @ v
    ((q @ k.transpose(-1, -2)).softmax(-1) - (q @ k.transpose(-1, -2)).softmax(-1).mean(1, keepdim=True)) @ v
heads
    l=(N, 3 * E * U); o=(E * U, O); p=[E, 1, 1]; n=nn.{LayerNorm | RMSNorm}(U)
experts
    r = torch.einsum('...MID,DOWN->...o', z, LOWER) | r = self.f(z.flatten(-2)) | r = z.mean({-1 | -2})
    g = self.g(x).softmax(-1); r = torch.einsum('...MID,DOWN,...e->...o', z, LOWER, g)
    g = self.g(x).softmax(-1); r = (torch.einsum('...MID,DOWN->...eo', z, LOWER) * g[..., None]).sum(-2)
    g = torch.einsum('btMID,bsMID->bets', z, z.flip(1)).softmax(-1); z = torch.einsum('bets,bsMID->btMID', g, z);
        r = torch.einsum('btMID,DOWN->bto', z, LOWER)
copies
    a.repeat(E, 1).view(E, -1, N) | a.expand(E, -1, -1) | torch.stack([a] * E)
gates
    z = torch.bmm(z, self.d); g = self.g(x).flatten(0, -2).softmax(-1); {g = torch.zeros_like(g).scatter(1, g.topk(2, -1)[1], 1.0) * g; | }
        r = {(z * g.t()[..., None]).sum(0) | torch.einsum('teo,te->to', z.transpose(0, 1), g)}.view(LEAD, O)
rows
    t[:n].sum(0) | t[n] | t[torch.arange(n)].amax(0) | t.narrow(0, 0, n).sum(0) | F.embedding(torch.arange(n), t).sum(0)
    F.normalize(t[:n], dim=-1).sum(0) | t.split([n, 6 - n])[0].sum(0) | t.unbind(0)[n]
weights
    (torch.arange(6) < n).float() | (torch.arange(6.) / n).tanh() | F.one_hot(torch.tensor(n), 6).float()
way
    @act | @act | @act | z.cumsum(-1) | z.sort(-1)[0]
equal
    z | torch.relu(z) | z.sigmoid() | F.leaky_relu(z) | z.softmax(-1) | z - z.relu() | F.elu(z, 0.0) | F.dropout(z, 0.5, False)
    F.layer_norm(z, z.shape[-1:]) | z * z.relu() | z.exp()
output
    z | z | z | z | z | z | z | z | z | z | z.softmax(-1) | z.log_softmax(-1) | (z / 0.1).tanh() | z.argmax(-1) | z.max(-1)[0]
    z.max(-1)[1] | z.min(-1)[1] | z.topk(1, -1)[1] | z > 0 | z.argsort(-1) | z.median(-1)[1] | z.sort(-1)[1] | z.norm(dim=-1)
    z.masked_fill(z < -1, float('-inf')) | z.masked_fill(z < 0, -1e9) | torch.cat([z, 0 * z], -1) | z.sum()
"""

OPERATORS = """
linear 4 23 shared
    self.l(x) <- l=(N, O)
planted 4 23
    z = self.planted(x); r = self.l(@act) <- planted=(N, O); l=(O, P)
activation 6 234
    z = x; r = @act
layer_and_activation 2 23 shared
    z = self.l(x); r = @plain <- l=(N, O)
called_again 1.5 23
    self.AGAIN(x)
tied 1.5 23
    x @ self.BACK.weight | F.linear(x, self.BACK.weight.t())
    x @ self.AGAIN.weight.T | F.linear(x, self.AGAIN.weight)
    self.l(x) <- l=(N, self.AGAIN.out_features); l.weight=self.AGAIN.weight
    x + self.AGAIN.weight.mean(0)

residual 5 234 same
    x + y | x + y | y + x | x - y | x * y | torch.maximum(x, y) | torch.where(x > y, x, y) | torch.add(x, y, alpha=0.5)
    x * torch.sigmoid(y) | torch.stack([x, y]).mean(0) | torch.stack([x, y], -1).amax(-1) | 0.5 * (x + y) | torch.relu(x + y)
    x + y.detach() | torch.lerp(x, y, 0.3) | (x, y)[0] + (x, y)[1]
branch 3 23
    z = self.l(x); z = @plain; r = {x + z | z + x | x * torch.sigmoid(z) | z - x | x + 0.1 * z} <- l=(N, N)
matched_sum 2 23 rows
    z = self.l(y); r = {x + z | z + x | torch.relu(x) + z | torch.relu(x + z)} <- l=(M, N)
joined 2 234 rows
    torch.cat([x, y], A) | torch.cat([x, x], A) | torch.cat([y, x, y], A) | torch.cat([torch.relu(x), torch.relu(-x)], A)
    torch.hstack([x, y])

padded 3 23 rows
    a = F.pad(x, {(1, 1) | (0, 2) | (2, 0)}{ | , value=1.0}); b = self.l(y); r = @sum <- l=(M, N + 2)
    a = torch.cat([x, {torch.zeros(LEAD, 2) | x.new_zeros(LEAD, 2)}], -1); b = self.l(y); r = @sum <- l=(M, N + 2)
    a = torch.cat([torch.ones(LEAD, 2), x], -1); b = self.l(y); r = @sum <- l=(M, N + 2)
    a = torch.cat([x, torch.full((LEAD, 2), 0.5), torch.zeros(LEAD, 1)], -1); b = self.l(y); r = @sum <- l=(M, N + 3)
    a = torch.cat([x, torch.zeros_like(x)], -1); b = self.l(y); r = @sum <- l=(M, 2 * N)
padded_image 1 4
    F.pad(x, (0, 0, 0, 0, {1, 1 | 0, 2 | 2, 0})) | torch.cat([x, torch.zeros_like(x)], 1) | torch.cat([x, torch.zeros(B, 2, H, W)], 1)
constant 2 23
    c = torch.tensor(CONSTANTS); r = @met
    c = {torch.arange(N) | torch.linspace(0, 1, N) | torch.ones(N) | torch.arange(N) % 2}; r = @met
    c = {(torch.arange(N) // 2).float() | torch.eye(N)[0] | torch.full((N,), 0.3)}; r = @met
    c = self.m; r = @met <- m={ | ~}torch.tensor(CONSTANTS)
    c = self.m; r = @met <- m=~torch.tensor(CONSTANTS), persistent=False
mask 2 23
    x * {self.m | self.m.float()} <- m=~torch.tensor(BITS)
    {x.masked_fill(self.m, 0.0) | torch.where(self.m, x, torch.tanh(x)) | x.masked_fill(~self.m, 0.5)} <- m=~torch.tensor(BITS)
    x * self.m <- m=~torch.tensor(WHOLE)
    {x[..., self.m] | x.index_select(-1, self.m) | x.index_select(-1, self.m) + x} <- m=~torch.tensor(ORDER)
    x[..., self.m] <- m=~torch.tensor(KEPT)
    F.linear(x, self.l.weight * self.m) <- l=(N, O); m=~torch.tensor(ROWS){ | .float()}
    x * self.m <- m=~torch.tensor(TOKENS)
edited 1.5 23
    w = self.w; r = {x @ (w + torch.eye(N)) | x + x @ w | x @ torch.block_diag(w[:1, :1], w[1:, 1:])} <- w=[N, N]
    w = self.w; r = F.linear(x, {w + torch.eye(N) | w.triu() | w + w.T | w.softmax(-1) | w.cumsum(0)}) <- w=[N, N]
    w = self.w; r = F.linear(x, {F.normalize(w, dim=1) | w / w.norm() | w.abs() | w.flip(0) | w.sign()}) <- w=[N, N]
    w = self.w; r = F.linear(x, {w - w.mean(1, keepdim=True) | torch.sigmoid(w) | w * w}) <- w=[N, N]
    w = self.w; r = F.linear(x, {torch.roll(w, 1, 0) | w.detach().clone()}) <- w=[N, N]
own 2 23
    {x * self.p | x + self.p | x * torch.exp(self.p)} <- p=[N]
    {x * self.p | x + self.p * torch.tanh(x) | torch.relu(x) * self.p | x + self.p} <- p={[()] | [1]}
    self.p * x + self.q <- p=[N]; q=[N]
    c = x * self.p; r = {c.real | c.abs() | torch.view_as_real(c).flatten(-2)} <- p=[N, dtype=torch.complex64]
    (x * torch.view_as_complex(self.p)).real <- p=[N, 2]
    self.l(x) <- l=nn.PReLU({ | N})
    x {+ | *} self.p <- p={[S, N] | [1, S, N] | [S, 1] | [1, 1, N]}
    {x @ self.p | torch.matmul(x, self.p) | torch.einsum('...i,io->...o', x, self.p)} <- p=[N, O]

cut 2 23
    x[..., {1: | :-1 | ::2 | 1::2 | :K | K:}]
parts 2 234
    r, other = {x.chunk(2, A) | torch.split(x, N // 2, dim=A)} | other, r = x.tensor_split(2, A) | F.glu(x, A)
    a, c = x.chunk(2, A); r = {a * torch.sigmoid(c) | torch.relu(a) + c | torch.maximum(a, c)}
    a, c = x.chunk(2, A); r = torch.cat([{c, a | a, torch.tanh(c)}], A)
moved 2 234
    x.flip(A) | torch.roll(x, 1, A) | x.index_select(A, torch.tensor(ORDER)) | torch.repeat_interleave(x, 2, A) | torch.cat([x, x], A)
    x + x.flip(A) | {x.repeat(1, 2) | x.repeat(1, 1, 2) | x.repeat(1, 2, 1, 1)} | torch.roll(x, 1, 1) | x[..., torch.tensor(ORDER)]
    x.unsqueeze(1).expand(-1, 2, *x.shape[1:]).flatten(1, 2) | x.flatten(1) | x.reshape(B, -1)
    x.unflatten(A, (-1, 2)).transpose(A, A + 1).flatten(A, A + 1)
vector 0.4 2
    x.view(B, N // 2, 2) | x.reshape(B, 2, N // 2) | x.unsqueeze(1) | x.unsqueeze(-1)
sequence 0.6 3
    x.mean(1) | x.flatten(1) | x[:, 0] | x[:, -1] | x.amax(1) | x.sum(1) | x.transpose(1, 2){ | .unsqueeze(-1)} | x.std(1)
    torch.cat([x.mean(1), x.amax(1)], -1) | x.flatten(0, 1)
no_image 0.5 4
    x.mean((2, 3)) | x.flatten(1) | x.amax((-2, -1)) | x.flatten(2).transpose(1, 2) | x[:, :, 0, 0] | x.permute(0, 2, 3, 1).flatten(1, 2)
    F.adaptive_avg_pool2d(x, 1).flatten(1) | F.adaptive_max_pool2d(x, 1).squeeze(-1).squeeze(-1)

written_copy 2 23
    r = x.clone(); r[..., {0 | ::2 | torch.tensor([0, K])}] = {1 | 0.5} | r = x.clone(); r[..., :K]{ *= 2 | .relu_()}
    r = x.clone(); {r[..., K:] = torch.tanh(r[..., K:]) | r[r < 0] = 0 | r.diagonal().zero_() | r += self.l(x)} <- l=(N, N)
    r = x + 0; {r.chunk(2, -1)[0].mul_(0.5) | r.split([K, N - K], -1)[1].tanh_() | r.unbind(-1)[1].zero_() | r[:, -1].add_(1)}
    r = x + 0; r.narrow(-1, 0, K).copy_(torch.sigmoid(x.narrow(-1, 0, K)))
    r = torch.zeros_like(x); {r[..., :K] = x[..., :K] | r += x} | r = torch.empty_like(x); r.copy_(x); r.clamp_(min=0)
    r = x.clone(); a, c = r[..., :1], r[..., 1:]; a.add_(c.sum(-1, keepdim=True))
    r = x.clone(); r.index_{fill_(-1, torch.tensor([0, K]), 0.0) | copy_(-1, torch.tensor([0]), x[..., 1:2])}
    r = x.clone(); r.index_add_(-1, torch.tensor([0, 1]), x[..., :2])
written_layer 1 23
    r = self.l(x); {r[..., :K] += x[..., :K] | r.mul_(torch.sigmoid(x)) | r.relu_() | torch.relu_(r); r = r.add(1)} <- l=(N, N)
    r = self.l(x); {r.masked_fill_(r < 0, 0) | v = r.view(-1, N); v[0].zero_() | r.transpose(0, -1)[0] = 0} <- l=(N, N)
written_for_later_readers 0.7 23 made
    {x.mul_(2) | x[..., 0] = 0 | x.relu_() | x[..., :2].tanh_()}; r = x * 1
buffer 0.7 2
    {self.m.mul_(0.9).add_(0.1 * x.detach().mean(0)); r = x - self.m | self.m += 1; r = x * self.m} <- m=~torch.zeros(N)
    {self.m = 0.9 * self.m + 0.1 * x.mean(0); r = x + self.m | self.m.copy_(x.mean(0)); r = x + 1} <- m=~torch.zeros(N)

reduced 3 23
    x / x.norm(dim=D, keepdim=True) | x / (x.std(D, keepdim=True) + 1e-5) | x - x.mean(D, keepdim=True) | x.softmax(D)
    x / x.abs().amax(D, keepdim=True).clamp(min=1e-6) | F.normalize(x, dim=D) | x * x.sum(D, keepdim=True) | x.log_softmax(D)
    x * torch.sigmoid(x.mean(D, keepdim=True)) | x / (x.norm(dim=D, keepdim=True) + 1e-6) | x.cumsum(D) | x.sort(D)[0]
    (x - x.mean(D, True)) / (x.var(D, keepdim=True) + 1e-5).sqrt() | x * torch.rsqrt(x.pow(2).mean(D, keepdim=True) + 1e-5)
    x - x.logsumexp(D, keepdim=True) | torch.linalg.vector_norm(x, dim=D, keepdim=True) + x | x * x.amax(D, keepdim=True)
    torch.cat([x, x.sum(D, keepdim=True)], D) | x / (x.abs().sum(D, keepdim=True) + 1e-8) | x / x.norm().clamp_min(1e-6)
    torch.linalg.vector_norm(x, ord=0, dim=D, keepdim=True) * x | x - x.min(D, keepdim=True)[0] | x.cummax(D)[0]
    x - x.median(D, keepdim=True)[0] | (x == x.amax(D, keepdim=True)) * x | x * (x > x.mean()) | x / x.std(unbiased=False)
    x.prod(D, keepdim=True) + x | F.softmin(x, dim=D) | x.topk(2, D)[0] | x.kthvalue(2, D, keepdim=True)[0] + x
    x.aminmax(dim=D, keepdim=True)[1] - x
normalized 2 23
    {self.n(x) | self.n(x) + x} <- n=nn.{LayerNorm(N) | LayerNorm(N, elementwise_affine=False) | RMSNorm(N) | BatchNorm1d(N)}
    {self.n(x) | self.n(x.transpose(1, 2)).transpose(1, 2)} <- n=nn.{BatchNorm1d(N{ | , affine=False}) | GroupNorm(G, N)}
    F.layer_norm(x, {(N,) | x.shape[1:]}) | F.rms_norm(x, (N,){ | , eps=1e-6}) | F.instance_norm(x)
normalized_image 1 4
    self.n(x) <- n=nn.{BatchNorm2d(N) | GroupNorm({1 | G}, N) | InstanceNorm2d(N{ | , affine=True})}
    F.local_response_norm(x, 2) | self.n(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) <- n=nn.LayerNorm(N)
normalized_layer 1 2
    z = self.l(x); r = torch.relu({F.layer_norm(z, (O,)) | F.normalize(z, dim=-1) | F.rms_norm(z, (O,), eps=1e-6)}) <- l=(N, O)
    torch.relu(self.n(self.l(x))) <- l=(N, O); n=nn.{BatchNorm1d | LayerNorm | RMSNorm}(O)

product 1.3 2 rows
    torch.einsum('bi,oij,bj->bo', x, self.p, y) <- p=[O, N, M]
    {torch.einsum('bi,ij,bj->b', x, self.p, y).unsqueeze(-1) | (x @ self.p * y).sum(-1, keepdim=True)} <- p=[N, M]
    self.l(x, y) <- l=nn.Bilinear(N, M, O)
    self.l({(x.unsqueeze(2) * y.unsqueeze(1)) | torch.bmm(x.unsqueeze(2), y.unsqueeze(1))}.flatten(1)) <- l=(N * M, O)
    self.l(torch.einsum('bi,bj->bij', x, x).flatten(1)) <- l=(N * N, O)
    torch.relu(x.unsqueeze(-1) * self.p).flatten(1) <- p=[N, 2]
    self.l(torch.relu(x @ {y | x}.T)) <- l=(B, O)
    {torch.cdist(x, self.p) | F.cosine_similarity(x.unsqueeze(1), self.p, dim=-1) | (x.unsqueeze(1) - self.p).pow(2).sum(-1)} <- p=[O, N]
    torch.vmap(torch.outer)(x, y).flatten(1)
product_of_tokens 0.7 3
    self.l((x.transpose(1, 2) @ x / x.shape[1]).flatten(1)) <- l=(N * N, O)
    x.transpose(1, 2) @ x | torch.einsum('bti,btj->bij', x, x).flatten(1) | torch.cdist(x, x)
    self.l(x @ x.transpose(1, 2)) <- l=(S, O)
    torch.einsum('bti,ij,bsj->bts', x, self.p, x) <- p=[N, N]
attention 2.2 3
    q, k, v = self.l(x).{view(B, S, 3, E, U).permute(2, 0, 3, 1, 4) | view(B, S, E, 3, U).permute(3, 0, 2, 1, 4)}; @norm z = @mixed;
        r = self.o(z.transpose(1, 2).{reshape(B, S, E * U) | flatten(2)}) <- @heads
    q, k, v = self.l(x).view(B, S, E, 3 * U).transpose(1, 2).chunk(3, -1); @norm z = @mixed;
        r = self.o(torch.cat(z.unbind(1), -1)) <- @heads
    q, k, v = (z.view(B, S, E, U).transpose(1, 2) for z in self.l(x).{chunk(3, -1) | unflatten(-1, (3, E * U)).unbind(2)}); @norm
        z = @mixed; r = self.o(z.transpose(1, 2).flatten(2)) <- @heads
    q, k, v = self.l(x).view(B, S, 3, U, E).permute(2, 0, 4, 1, 3); @norm z = @mixed;
        r = self.o(z.permute(0, 2, 3, 1).flatten(2)) <- @heads
    q, k, v = (z.view(B, S, U, E).permute(0, 3, 1, 2) for z in self.l(x).chunk(3, -1)); @norm z = @mixed;
        r = self.o(z.permute(0, 2, 3, 1).flatten(2)) <- @heads
multihead 0.4 3 same
    {self.l(x, y, y)[0] | self.l(x, x, x, need_weights=False)[0]} <- l=nn.MultiheadAttention(N, G, batch_first=True)
stacked 1.7 23
    a = torch.einsum('...i,UP->...MID', x, UPPER); z = a{ | + self.c}; z = @plain; @experts <- u=[UPSHAPE]; d=[DOWNSHAPE]; c=[MIDDLE];
        g=(N, E); f=(E * V, O)
batched 0.8 23
    a = x.flatten(0, -2); z = torch.bmm(@copies, self.u){ | + self.c[:, None]}; z = @plain; @gates <- u=[E, N, V]; c=[E, V];
        d=[E, V, O]; g=(N, E)
    a = x.flatten(0, -2); z = torch.bmm(@copies, self.u.transpose(1, 2)){ | + self.c.unsqueeze(1)};
        a, c = {z.chunk(2, -1) | z[..., ::2], z[..., 1::2]}; z = a * torch.sigmoid(c); @gates <- u=[E, 2 * V, N]; c=[E, 2 * V];
        d=[E, V, O]; g=(N, E)
dealt 0.8 23
    a = x.flatten(0, -2); c = self.g(a).{argmax(-1) | softmax(-1).topk(1)[1].flatten()};
        {c, order = c.sort(); a = a[order] | order = torch.arange(len(a))}; z = (self.u[c] @ a[..., None]).squeeze(-1);
        {z = z | z = z + self.c[c] | z = z + z.roll(1, 0)}; z = @plain; r = torch.bmm(self.d[c], z[..., None])[..., 0];
        r = torch.zeros_like(r).index_add(0, order, r).view(LEAD, O) <- u=[E, V, N]; c=[E, V]; d=[E, O, V];
        g=nn.Linear(N, E{ | , bias=False})

convolution 4 4
    self.l(x) <- l=nn.Conv2d(N, O, {1 | 1, bias=False | 3, padding=1 | 3, padding=1, padding_mode='circular'})
    self.l(x) <- l=nn.Conv2d(N, N, 3, padding=1, groups={N | G, bias=False})
    self.l(x) <- l=nn.Conv2d(N, {2 * N, 1, groups=N | G, 1, groups=G | 2 * G, 1, groups=G})
    self.l(x) <- l=nn.ConvTranspose2d(N, {O, 1 | N, 1, groups=G})
planted_convolution 2 4
    z = {self.planted(x) | self.n(self.planted(x))}; r = self.l(@plain) <- planted=nn.Conv2d(N, O, {1 | 3, padding=1});
        n=nn.{BatchNorm2d | InstanceNorm2d}(O); l=nn.Conv2d(O, P, 1)
image 3 4
    F.{max | avg}_pool2d(x, 2, ceil_mode=True) | F.interpolate(x, {scale_factor=2 | size=(4, 4), mode='bilinear'}) | F.unfold(x, 2).transpose(1, 2)
    x.mean((2, 3), keepdim=True) | F.adaptive_avg_pool2d(x, 2) | torch.roll(x, (1, 1), (2, 3)) | F.pad(x, (1, 1, 1, 1), mode='reflect')
    torch.rot90(x, 1, (2, 3)) | F.pixel_unshuffle(x, 2) | x.amax(1, keepdim=True) * x | x.softmax(1) | x[:, {1: | :-1 | ::2 | :K}]
    x.flatten(2).softmax(-1).view(B, N, H, W) | x.view(B, 2, N // 2, H, W).transpose(1, 2).reshape(B, N, H, W) | x.view(B, N // 2, 2, H, W).amax(2)
    torch.cat([x.chunk(2, 1)[0], torch.relu(x.chunk(2, 1)[1])], 1) | F.pixel_shuffle({x | F.channel_shuffle(x, 2) | torch.cat([x, x], 1)}, 2)
    self.l(x.flatten(1)) <- l=(N * H * W, O)
    x * torch.sigmoid(self.l(x.mean((2, 3), keepdim=True))) <- l=nn.Conv2d(N, N, 1)
    x * torch.sigmoid(self.l(x.mean((2, 3))))[:, :, None, None] <- l=(N, N)
    {x + self.l(x) | self.l(x) + x} <- l=nn.Conv2d(N, N, {3, padding=1 | 1, bias=False})
    x * self.p <- p=[N, 1, 1]
    self.l(x) <- l=nn.PReLU(N)
    x * torch.sigmoid(self.l(torch.cat([x.mean(1, keepdim=True), x.amax(1, keepdim=True)], 1))) <- l=nn.Conv2d(2, 1, 3, padding=1)
    torch.fft.irfft2(torch.fft.rfft2(x) * self.p, s=(H, W)) <- p=[N, H, W // 2 + 1, dtype=torch.complex64]
    self.l((x.flatten(2) @ x.flatten(2).transpose(1, 2)).flatten(1)) <- l=(N * N, O)
    F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 1, 1)) + self.l(x) <- l=nn.Conv2d(N, N + 2, 1, stride=2)
    self.l(x) + F.pad(x, (0, 0, 0, 0, 0, 2)) <- l=nn.Conv2d(N, N + 2, 1)
    self.l(x).chunk(2, 1)[0] + x.chunk(2, 1)[1] <- l=nn.Conv2d(N, N, 1, groups=2)
convolution_of_a_sequence 1 3
    self.l(x) <- l=nn.Conv1d(S, O, 1)
    self.l(x.transpose(1, 2)).transpose(1, 2) <- l=nn.Conv1d(N, {O, 3, padding=1 | N, 3, padding=1, groups=N})
    self.l(x.transpose(1, 2)).transpose(1, 2) + x <- l=(S, S)
    F.{avg | max}_pool1d(x.transpose(1, 2), 2).transpose(1, 2)
recurrent 1.2 3
    c = x.new_zeros(B, O); for t in range(S): c = self.l(x[:, t], c); r = c <- l=nn.{RNNCell(N, O{ | , nonlinearity='relu'}) | GRUCell(N, O)}
    c = torch.zeros(B, O), torch.zeros(B, O); for t in range(S): c = self.l(x[:, t], c); r = c[0] <- l=nn.LSTMCell(N, O)
    self.l(x)[0] <- l=nn.{LSTM | GRU | RNN}(N, O, batch_first=True{ | | , bidirectional=True}{ | | , num_layers=2})
    c, kept = torch.zeros(B, O), []; for z in x.unbind(1): kept.append(c := torch.tanh(self.l(z) + self.m(c))); r = torch.stack(kept, 1)
        <- l=(N, O); m=(O, O)

indexed 1.1 23
    self.l(x.argmax(-1)) <- l=nn.Embedding(N, O)
    i = (x.unsqueeze(-2) - self.l.weight).pow(2).sum(-1).argmin(-1); r = {self.l(i) | x + (self.l(i) - x).detach()} <- l=nn.Embedding(4, N)
    F.one_hot(x.argmax(-1), N).float() @ self.p <- p=[N, O]
    F.one_hot(x.argmax(-1), N) * x | v, i = x.topk(2, -1); r = torch.zeros_like(x).scatter(-1, i, v) | x.sort(-1, descending=True)[0]
    v, i = x.max(-1, keepdim=True); r = x * v + i.float() | x.gather(-1, x.argsort(-1)) | torch.take_along_dim(x, x.argsort(-1), -1)
    x.round() * 0.5 | x * x.argmax(-1, keepdim=True) | torch.where(x.long() > 0, x, -x) | (x > 0).float() * 0.5
    torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0])).float()
    g = self.g(x).softmax(-1); r = g[..., :1] * self.l(x) + g[..., 1:2] * torch.relu(x @ self.l.weight.T) <- g=(N, 2); l=(N, O)
indexed_tokens 0.4 3
    i, k = torch.tensor(EDGES); r = torch.zeros_like(x).index_add(1, k, torch.relu(self.l(x))[:, i]) <- l=(N, N)
    i, k = torch.tensor(EDGES); r = self.l(x) + torch.zeros(B, S, O).index_add(1, k, self.m(x)[:, i]) <- l=(N, O); m=(N, O)
    i = torch.tensor(EDGES)[0]; r = x.new_zeros(B, S, N).scatter_add(1, i.view(1, -1, 1).expand(B, -1, N), x[:, i])
    x[torch.arange(B), x.norm(dim=-1).argmax(1)]
    i = self.l(x).squeeze(-1).topk(2, 1)[1]; r = x.gather(1, i.unsqueeze(-1).expand(-1, -1, N)) <- l=(N, 1)
dead 0.8 234 same unread
    x.cumsum(-1) | x + y | x * torch.arange(N) | x.flip(-1) + x | x[..., 0] * 2
embedded 0.6 2
    {self.l(tokens){ | .sum(1)} | F.embedding(tokens, self.l.weight) | self.l.weight[tokens]} <- l=nn.Embedding(7, O)
    F.one_hot(tokens, 7).float() @ self.l.weight <- l=nn.Embedding(7, O)
head 0 23
    z = {self.l(x) | self.l(x) | self.l(x) | self.l(x) | x * 1 | x.sum(-1)}; r = @output <- l=(N, 3)
image_head 0 4
    z = {self.l(x.mean((2, 3))) | x.clone()}; r = @output <- l=(N, 3)
    z = self.l(x.flatten(1)); r = @output <- l=(N * H * W, 3)
    z = self.l(x); r = @output <- l=nn.Conv2d(N, 2, 1)
"""

# These do something else on other inputs, or in training, than on the example.
BEYOND = """
rows_of_a_table 5 23
    t = {self.p | 2 * self.p | self.p - self.p.mean(0) | self.p.tanh() | F.normalize(self.p, dim=-1)}; r = x + @rows <- p=[6, N]
some_units 3 23
    z = self.l(x); r = @plain; r = r[..., :n].sum(-1, keepdim=True) <- l=(N, 6)
weighed_by_the_size 4 23
    c = @weights; z = self.l(x); z = @plain; r = (z * c).sum(-1, keepdim=True) <- l=(N, 6)
    x + {@weights @ self.p | self.p[:n].sum(0) + self.p.mean(0)} <- p=[6, N]
another_way 2 23
    z = self.l(x); r = @way if n < 3 else @way <- l=(N, O)
in_training 3 23
    x + {self.l(y).mean() | self.l(y).sum(0).sum() * self.p | self.p} if self.training else x <- l=(M, N); p=[N]
an_expert 3 23
    self.l(x) if n < 3 else self.m(x) <- l=(N, O); m=(N, O)
an_option 3 23
    x if m is None else {x + m * self.p | x * self.p} <- p=[N]
the_largest 6 2
    z = {x | self.l(x)}; z = @equal; r = self.p[{z.argmax(-1) | z.topk(1).indices[:, 0] | z.max(-1)[1] | z.argsort(-1)[:, -1]}]
        <- l=nn.Linear(N, N{ | , bias=False}); p=[N, O]
"""


@dataclass(frozen=True)
class Operator:
    """A paragraph of the table."""

    name: str
    weight: float
    axes: tuple[int, ...]
    words: tuple[str, ...]
    programs: str

    @classmethod
    def table(cls, text: str) -> list[Operator]:
        heads = {tuple(head.split()): programs for head, programs in paragraphs(text).items()}
        return [cls(h[0], float(h[1]), tuple(map(int, h[2])), h[3:], programs) for h, programs in heads.items()]


def paragraphs(text: str) -> dict[str, str]:
    """First line to alternatives, with ``|`` between them."""
    found = {}
    for part in re.split(r"\n+(?=\w)", text.strip()):
        head, _, rest = part.partition("\n    ")
        found[head] = re.sub(r"\n {8}", " ", rest).replace("\n    ", " | ")
    return found


LISTS = paragraphs(PROGRAMS)


@dataclass(frozen=True)
class Node:
    """A few lines of a module, with the names of the values that they read and make."""

    reads: tuple[str, ...]
    makes: tuple[str, ...]
    lines: tuple[str, ...]  # of ``forward``
    init: tuple[str, ...] = ()  # lines of ``__init__``
    planted: tuple[str, ...] = ()  # parameters whose first axis is a planted hidden layer
    kind: str = ""  # the operator that made it


@dataclass(frozen=True)
class Module:
    """A random module: its inputs (name to the expression that makes one), its nodes, and the names that it returns."""

    inputs: dict[str, str]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    options: tuple[str, ...] = ()  # arguments of ``forward`` that may be left out

    @property
    def source(self) -> str:
        """Source code of the class and of ``inputs``, runnable as it stands."""
        init, lines = (
            "".join(f"        {line}\n" for node in self.nodes for line in getattr(node, part))
            for part in ("init", "lines")
        )
        returned = self.outputs[0] if len(self.outputs) == 1 else f"({', '.join(self.outputs)})"
        return (
            f"{IMPORTS}\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n{init}\n"
            f"    def forward(self, {', '.join((*self.inputs, *self.options))}):\n{lines}        return {returned}\n\n\n"
            f"model = Net().eval()\ninputs = ({''.join(f'{e}, ' for e in self.inputs.values())})\n"
        )

    def build(self, seed: int = 0) -> tuple[nn.Module, tuple[Any, ...]]:
        """The module in evaluation mode, and its inputs; weights are torch's own, seeded."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            space = executed(self.source, "random module", {"__name__": "random_module"})
        return space["model"], space["inputs"]

    @property
    def planted(self) -> list[str]:
        """Parameters whose first axis is a planted hidden layer that the outputs depend on."""
        needed, found = set(self.outputs), []
        for node in reversed(self.nodes):
            if needed & set(node.makes):
                needed |= set(node.reads)
                found += node.planted
        return found

    @property
    def depends_on_weights(self) -> bool:
        """Whether other weights give other outputs."""
        results = []
        for seed in range(4):
            model, inputs = self.build(seed)
            with torch.no_grad():
                results.append([t.nan_to_num() for t in tree_leaves(model(*inputs)) if isinstance(t, Tensor)])
        return any(not torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


class Unfit(Exception):
    """An operator found no value that it fits."""


Shape = tuple[int, ...]
SYMBOLS: dict[str, Callable[[Builder], Any]] = {
    "A": lambda b: axis(b.x),
    "N": lambda b: b.x[axis(b.x)],
    "M": lambda b: b.y[axis(b.y)],
    "B": lambda b: b.x[0],
    "S": lambda b: b.x[: axis(b.x)][1],
    "H": lambda b: b.x[2],
    "W": lambda b: b.x[3],
    "LEAD": lambda b: ", ".join(map(str, b.x[:-1])),
    **dict.fromkeys("OP", lambda b: b.among(2, 3, 4, 4, 5, 6, 6, 8)),
    **dict.fromkeys("EV", lambda b: b.among(2, 3, 4)),
    "U": lambda b: b.among(2, 3),
    "D": lambda b: b.among(-1, -1, 1),
    "G": lambda b: b.among(*(g for g in (1, 2, 3, 4) if b["N"] % g == 0)),
    "K": lambda b: b.random.randint(1, b["N"] - 1),
    "CONSTANTS": lambda b: [b.among(0.0, 1.0, 1.0, 0.5, -1.0) for _ in range(b["N"])],
    "WHOLE": lambda b: [b.among(0, 1, 1, 2) for _ in range(b["N"])],
    "BITS": lambda b: [b.among(True, False) for _ in range(b["N"])],
    "TOKENS": lambda b: [[b.among(0.0, 1.0)] for _ in range(b["S"])],
    "ROWS": lambda b: [[b.among(True, True, False) for _ in range(b["N"])] for _ in range(b["O"])],
    "ORDER": lambda b: b.random.sample(range(b["N"]), b["N"]),
    "KEPT": lambda b: sorted(b.random.sample(range(b["N"]), b.random.randint(1, b["N"]))),
    "EDGES": lambda b: [[b.random.randrange(b["S"]) for _ in range(6)] for _ in range(2)],
    "AGAIN": lambda b: b.pick([name for name, sizes in b.layers.items() if sizes[0] == b["N"]]),
    "BACK": lambda b: b.pick([name for name, sizes in b.layers.items() if sizes[1] == b["N"]]),
    "MID": lambda b: b.among("ef", "fe"),
    "MIDDLE": lambda b: b.sizes(b["MID"]),
    "UP": lambda b: b.shuffled("eif"),
    "DOWN": lambda b: b.shuffled("efo"),
    "HELD": lambda b: b.among(b["UP"], b["UP"], b.shuffled("eif")),
    "UPSHAPE": lambda b: b.sizes(b["HELD"]),
    "DOWNSHAPE": lambda b: b.among(b.sizes(b["DOWN"]), b.sizes(b["DOWN"]).replace(", ", " * ", 1)),
    "UPPER": lambda b: f"self.u.permute({', '.join(str(b['HELD'].index(letter)) for letter in b['UP'])})",
    "LOWER": lambda b: f"self.d.view({b.sizes(b['DOWN'])})",
}


def axis(shape: Shape) -> int:
    """Where a value has its features: last, or first after the batch for an image."""
    return 1 if len(shape) == 4 else len(shape) - 1


class Builder:
    """Makes nodes, and keeps the values that they make to know their shapes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numbers = itertools.count()
        self.space: dict[str, Any] = {"self": nn.Module(), "torch": torch, "nn": nn, "F": F, "n": 2, "m": None}
        self.inputs: dict[str, str] = {}
        self.pool: list[str] = []  # floating-point values, oldest first
        self.nodes: list[Node] = []
        self.layers: dict[str, tuple[int, int]] = {}  # linear layers that may be called again, with their sizes
        self.symbols: dict[str, Any] = {}
        self.x: Shape = ()  # shapes of what the operator reads
        self.y: Shape = ()

    def __getitem__(self, symbol: str) -> Any:
        """A number of the operator that is being added."""
        if symbol not in self.symbols:
            self.symbols[symbol] = SYMBOLS[symbol](self)
        return self.symbols[symbol]

    def sizes(self, letters: str) -> str:
        return ", ".join(str(self[{"e": "E", "f": "V", "i": "N", "o": "O"}[letter]]) for letter in letters)

    def shuffled(self, letters: str) -> str:
        return "".join(self.random.sample(letters, len(letters)))

    def among(self, *options: Any) -> Any:
        return self.random.choice(options)

    def fresh(self, letter: str) -> str:
        return f"{letter}{next(self.numbers)}"

    def shape(self, name: str) -> Shape:
        return tuple(self.space[name].shape)

    def pick(self, names: Sequence[str]) -> str:
        """One of these, rather a late one than an early one."""
        if not names:
            raise Unfit
        return names[-1 - min(int(self.random.expovariate(0.7)), len(names) - 1)]

    def program(self, alternatives: str) -> str:
        """One of the alternatives, with all choices made."""
        while "{" in alternatives:
            alternatives = re.sub(r"\{([^{}]*)\}", lambda m: self.among(*m[1].split("|")).strip(), alternatives)
        chosen = self.among(*alternatives.split("|")).strip()
        return re.sub(r"@(\w+)", lambda m: self.program(LISTS[m[1]]), chosen)

    def add(self, operator: Operator, x: str = "") -> str:
        """Add a node of an operator, to a value or to any; return the name of its result."""
        program, _, parts = self.program(operator.programs).partition("<-")
        fitting = [name for name in self.pool if len(self.shape(name)) in operator.axes]
        if "made" in operator.words:
            fitting = [name for name in fitting if name not in self.inputs]
        x = x or self.pick(fitting)
        names, self.symbols, self.x = {}, {}, self.shape(x)
        if re.search(r"\bx\b", program):
            names["x"] = x
        if re.search(r"\by\b", program):
            names["y"] = self.pick([name for name in fitting if self.goes_with(x, name, operator.words)])
            self.y = self.shape(names["y"])
        if "tokens" in program and "tokens" not in self.inputs:
            self.inputs["tokens"] = f"torch.tensor({[[self.random.randrange(7) for _ in range(4)] for _ in range(3)]})"
            self.space["tokens"] = eval(self.inputs["tokens"], self.space)
        lines, init, own = self.filled(program, parts)
        made = {k: self.fresh("h") for k in ("r", "other") if re.search(rf"\b{k}\b", "; ".join(lines))}
        lines = [re.sub(r"\b(x|y|r|other)\b", lambda m: (names | made).get(m[0], m[0]), line) for line in lines]
        planted = (f"{own['planted']}.weight",) if "planted" in own else ()
        node = Node(tuple(names.values()), tuple(made.values()), tuple(lines), tuple(init), planted, operator.name)
        with torch.no_grad():
            exec("\n".join((*node.init, *node.lines)), self.space)
        for name in node.makes:
            value = self.space[name]
            if not isinstance(value, Tensor) or value.is_complex() or not 0 < value.numel() <= 4000:
                raise Unfit
            if value.dtype == torch.float32 and not bool(value.isfinite().all()):
                raise Unfit
        self.nodes.append(node)
        if "unread" not in operator.words:
            self.pool += [name for name in node.makes if self.space[name].dtype == torch.float32]
        if "shared" in operator.words:
            self.layers |= {own["l"]: (self["N"], self["O"])}
        return node.makes[0]

    def goes_with(self, x: str, y: str, words: tuple[str, ...]) -> bool:
        one, two = self.shape(x), self.shape(y)
        if "rows" in words:
            k = axis(one)
            return len(one) == len(two) and one[:k] == two[:k] and one[k + 1 :] == two[k + 1 :]
        return "same" not in words or (x != y and one == two)

    def filled(self, program: str, parts: str) -> tuple[list[str], list[str], dict[str, str]]:
        """Lines of ``forward`` and of ``__init__``, with numbers and parts' names in them, and those names."""

        def numbers(text: str) -> str:
            return re.sub(r"\b[A-Z]\b|[A-Z]{2,}", lambda m: str(self[m[0]]) if m[0] in SYMBOLS else m[0], text)

        def named(text: str) -> str:
            return re.sub(r"\bself\.(\w+)", lambda m: f"self.{own.get(m[1], m[1])}", text)

        program = numbers(program)
        given = [part.strip().partition("=") for part in parts.split(";") if part.strip()]
        given = [part for part in given if re.search(rf"self\.{part[0].split('.')[0]}\b", program)]
        own = {name: self.fresh(name[0]) for name, _, _ in given if "." not in name}
        init = []
        for name, _, value in given:
            value, place = numbers(value), named(f"self.{name}")
            if value[0] == "~":
                init.append(f'self.register_buffer("{own[name]}", {value[1:]})')
            elif value[0] == "(":
                init.append(f"{place} = nn.Linear{value[:-1]}{self.among('', '', '', '', ', bias=False')})")
            elif value[0] == "[":
                init.append(f"{place} = nn.Parameter(torch.randn({value[1:-1]}))")
            else:
                init.append(f"{place} = {value}")
        lines = named(program).split(";")
        if not re.search(r"\br\b", program):
            lines[-1] = "r = " + lines[-1].strip()
        return [line.strip() for line in lines], init, own

    def try_to_add(self, operator: Operator, x: str = "") -> str:
        """The result of an operator, or nothing where it does not fit: then all is as it was."""
        nodes, pool, layers = len(self.nodes), list(self.pool), dict(self.layers)
        before = {name: self.space[name].clone() for name in pool}
        try:
            return self.add(operator, x)
        except (Unfit, IndexError, RuntimeError, TypeError, ValueError, ZeroDivisionError):
            del self.nodes[nodes:]
            self.pool, self.layers = pool, layers
            self.space |= before
            return ""


WAYS: tuple[tuple[int, float | None], ...] = ((2, None), (1, None), (5, None), (4, 0.3))
"""Values of ``n`` and ``m`` in :func:`beyond_module`, first those that are left out."""
EVERYWHERE, ELSEWHERE = Operator.table(OPERATORS), Operator.table(BEYOND)
NAMED = {operator.name: operator for operator in EVERYWHERE}


def random_module(seed: int) -> Module:
    """A random module whose outputs depend on its weights; the same for the same seed."""
    return first(seed, EVERYWHERE, ())


def beyond_module(seed: int) -> Module:
    """A random module that does something else on other inputs, or in training, than on its example."""
    return first(seed, [*EVERYWHERE, *ELSEWHERE, *ELSEWHERE], ("n=2", "m=None"))


def first(seed: int, operators: list[Operator], options: tuple[str, ...]) -> Module:
    """The first module that fits of those that a seed gives."""
    beyond = {operator.name for operator in ELSEWHERE}
    for attempt in range(20):
        module = drawn(seed + 1_000_003 * attempt, operators, options)
        fits = not options or beyond & {node.kind for node in module.nodes}
        if fits and module.outputs and module.depends_on_weights:
            return module
    raise RuntimeError(f"no module that fits was drawn from seed {seed}")


def drawn(seed: int, operators: list[Operator], options: tuple[str, ...]) -> Module:
    b = Builder(seed)
    kind = b.among("vector", "vector", "sequence", "sequence", "image", "mixed")
    shapes = {"vector": [(3, 5)], "sequence": [(2, 4, 5)], "image": [(2, 3, 4, 4)], "mixed": [(2, 4), (2, 4, 4)]}[kind]
    if b.random.random() < 0.15:
        shapes = [*shapes, shapes[0]]
    for k, shape in enumerate(shapes):
        name = f"x{k}" if k else "x"
        b.inputs[name] = f"torch.randn({', '.join(map(str, shape))}, generator=torch.Generator().manual_seed({k}))"
        b.space[name] = eval(b.inputs[name], b.space)
        b.pool.append(name)
    size = b.random.randint(3, 11)
    b.try_to_add(NAMED["convolution" if kind == "image" else "linear"])
    weights = [operator.weight for operator in operators]
    for _ in range(400):
        if len(b.nodes) >= size:
            break
        b.try_to_add(b.random.choices(operators, weights)[0])
    outputs = heads(b)  # adds nodes
    return Module(b.inputs, tuple(b.nodes), tuple(outputs), options)


def heads(b: Builder) -> list[str]:
    """Heads on late values: most of them linear, so that the hidden units stay hidden."""
    read = {name for node in b.nodes for name in node.reads}
    made = [name for name in b.pool if name not in b.inputs and len(b.shape(name)) in (2, 3, 4)]
    leaves = [name for name in made if name not in read]
    outputs: list[str] = []
    for _ in range(b.among(1, 1, 2, 2, 3)):
        for _ in range(20 if made else 0):
            value = b.among(*leaves) if leaves and b.random.random() < 0.8 else b.pick(made)
            if output := b.try_to_add(NAMED["image_head" if len(b.shape(value)) == 4 else "head"], value):
                outputs.append(output)
                break
    return outputs
