"""Which operators the fake CUDA device replaces and how; fused CUDA kernels in terms of others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torchgen

# Operators whose CUDA kernels stay: views, allocations, and those that are written below.
_KEPT = """empty.memory_format empty_strided _efficientzerotensor view view.dtype as_strided _reshape_alias unfold
set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor set_ resize_ record_stream _pin_memory
is_pinned is_set_to _fused_sdp_choice _cudnn_init_dropout_state _local_scalar_dense_ _nested_view_from_buffer
_cufft_get_plan_cache_size _cufft_clear_plan_cache _cufft_get_plan_cache_max_size _cufft_set_plan_cache_max_size
_assert_async _assert_async.msg _copy_from _copy_from_and_resize segment_reduce _cudnn_rnn_flatten_weight _cudnn_rnn
_fused_rms_norm _fused_rms_norm_backward _thnn_fused_lstm_cell
_thnn_fused_lstm_cell_backward_impl _thnn_fused_gru_cell"""
# Operators without a kernel of CUDA's own that take one here.
_ADDED = """copy_ convolution convolution_backward _assert_async _assert_async.msg _fft_r2c _fft_c2c _fft_c2r
complex.out linalg_eig linalg_eig.out linalg_eigvals.out"""
# Operators that wait for the device.
_WAITS = """_local_scalar_dense equal nonzero nonzero_static masked_select _unique _unique2 unique_dim
unique_consecutive unique_dim_consecutive is_nonzero repeat_interleave.Tensor repeat_interleave bincount histc
_linalg_check_errors masked_select.out multinomial_ allclose linalg_eig linalg_lstsq nonzero.out"""
# What PyTorch's CUDA sources alert of (torch.use_deterministic_algorithms).
_NONDETERMINISTIC = """adaptive_avg_pool2d_backward _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward
adaptive_max_pool2d_backward adaptive_max_pool3d_backward avg_pool3d_backward fractional_max_pool2d_backward
fractional_max_pool3d_backward max_pool3d_with_indices_backward
upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_trilinear3d_backward
reflection_pad1d_backward reflection_pad2d_backward replication_pad1d_backward replication_pad2d_backward
replication_pad3d_backward _ctc_loss_backward histc kthvalue grid_sampler_2d_backward
grid_sampler_3d_backward cumsum put_ nll_loss2d_forward nll_loss2d_backward _embedding_bag_dense_backward"""
# Operators without integers on CUDA, and those of cuBLAS.
_NO_INTEGERS = "mm addmm bmm baddbmm addmv dot vdot"
_CUBLAS = "mm addmm bmm baddbmm addmv dot addbmm"


def lists() -> list[bytes]:
    """The lists that ``fake_cuda_register`` takes, in its order."""
    own = [_KEPT, _ADDED, None, _WAITS, _NONDETERMINISTIC, _NO_INTEGERS, _CUBLAS]
    return [_unchecked() if names is None else _aten(names.split()) for names in own]


def _aten(names: list[str]) -> bytes:
    return " ".join(f"aten::{name}" for name in names).encode()


def _unchecked() -> bytes:
    """Operators whose kernels check devices themselves (TensorIterator: scalars on the CPU are let through)."""
    text = (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text()
    checks, delegates = {}, {}
    for block in re.split(r"^- func: ", text, flags=re.M)[1:]:
        name = block.split("(")[0]
        checks[name] = not re.search(r"^  device_check: NoCheck", block, re.M)
        if found := re.search(r"^  structured_delegate: (\S+)", block, re.M):
            delegates[name] = found[1]
    free = {name for name in checks if not (checks[name] and checks[delegates.get(name, name)])}
    return _aten(sorted({name.split(".")[0] for name in free}))


def _lstm_cell(input_gates: Any, hidden_gates: Any, cx: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
    gates = input_gates + hidden_gates
    if input_bias is not None:
        gates = gates + input_bias + hidden_bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def _gru_cell(input_gates: Any, hidden_gates: Any, hx: Any, input_bias: Any = None, hidden_bias: Any = None) -> Any:
    if input_bias is not None:
        input_gates, hidden_gates = input_gates + input_bias, hidden_gates + hidden_bias
    ir, iz, inew = input_gates.chunk(3, 1)
    hr, hz, hnew = hidden_gates.chunk(3, 1)
    r, z = (ir + hr).sigmoid(), (iz + hz).sigmoid()
    new = (inew + r * hnew).tanh()
    return new + z * (hx - new), torch.cat([r, z, new, hx, hnew], 1)


def _lstm_cell_backward(grad_hy: Any, grad_cy: Any, cx: Any, cy: Any, workspace: Any, has_bias: Any) -> Any:
    i, f, g, o = workspace.chunk(4, 1)
    t = cy.tanh()
    dh = grad_hy if grad_hy is not None else torch.zeros_like(cy)
    dc = dh * o * (1 - t * t) + (grad_cy if grad_cy is not None else 0)
    gates = torch.cat([dc * g * i * (1 - i), dc * cx * f * (1 - f), dc * i * (1 - g * g), dh * t * o * (1 - o)], 1)
    return gates, dc * f, gates.sum(0) if has_bias else torch.Tensor()


def _rms_norm(input: Any, shape: Any, weight: Any, eps: Any) -> Any:
    axes = tuple(range(-len(shape), 0))
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    rstd = (input.square().mean(axes, keepdim=True) + eps).rsqrt()
    out = input * rstd
    return (out if weight is None else out * weight), rstd


def _rms_norm_backward(grad: Any, input: Any, shape: Any, rstd: Any, weight: Any, mask: Any) -> Any:
    axes = tuple(range(-len(shape), 0))
    normal = input * rstd
    own = grad if weight is None else grad * weight
    dx = rstd * (own - normal * (own * normal).mean(axes, keepdim=True))
    dw = (grad * normal).sum(tuple(range(input.dim() - len(shape)))) if mask[1] else torch.Tensor()
    return dx, dw


_FUSED = {
    "_fused_rms_norm": _rms_norm,
    "_fused_rms_norm_backward": _rms_norm_backward,
    "_thnn_fused_lstm_cell": _lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": _lstm_cell_backward,
    "_thnn_fused_gru_cell": _gru_cell,
}
_library = torch.library.Library("aten", "IMPL", "CUDA")  # as long as it lives its kernels hold


def register() -> None:
    """Put these functions in place of CUDA's fused kernels; layers without cuDNN and attention in plain products."""
    for name, function in _FUSED.items():
        _library.impl(name, function, allow_override=True)
    torch.backends.cudnn.enabled = False
    for choose in ("flash", "mem_efficient", "cudnn"):
        getattr(torch.backends.cuda, f"enable_{choose}_sdp")(False)
