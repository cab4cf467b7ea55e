"""Rules for recurrent layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tu_symmetry.symmetry import views
from tu_symmetry.symmetry.algebra import Array, Label, Value, along, pinned_value
from tu_symmetry.symmetry.operators.rearranging import pin_tensor
from tu_symmetry.symmetry.rules import Call, register_rule


@register_rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(call: Call) -> list[Value]:
    ledger = call.ledger
    gates = {"aten.lstm": 4, "aten.gru": 3}.get(call.operator, 1)
    batch_first = bool(call.get("batch_first", False))
    value: Value = call.get("input", call.get("data"))  # the latter is packed: ``[steps of all sequences, features]``
    pin_tensor(call, call.get("batch_sizes"), "lengths of sequences")
    value = views.mix(ledger, value, 1 if batch_first and value.ndim == 3 else 0, "time step")
    value = views.unnest(ledger, value, value.ndim - 1)
    samples = 0 if batch_first else 1
    batch = (value.labels[samples], value.reasons[samples]) if value.ndim == 3 else ((), "")
    directions = 2 if call["bidirectional"] else 1
    parameters: list[Value] = list(call["params"])
    states = call["hx"] if isinstance(call["hx"], (list, tuple)) else [call["hx"]]
    layers = int(call["num_layers"])
    each = len(parameters) // (layers * directions)
    label, terms = views.channel(ledger, value, value.ndim - 1)
    source = Value((value.shape[-1],), (label,), (value.reasons[-1],), terms)
    cells: list[Value] = []
    finals: list[Value] = []
    for layer in range(layers):
        outs = []
        for direction in range(directions):
            w_ih, w_hh, *others = parameters[(layer * directions + direction) * each :][:each]
            projection = next((b for b in others if b.ndim == 2), None)
            units = _gates(call, gates, source, w_ih, w_hh, [b for b in others if b.ndim == 1])
            hidden = len(units)
            out = units
            if projection is not None:
                ledger.pin_scale(projection.scale)
                ledger.unify(projection.labels[1], (units.reshape(1, -1),))
                out = ledger.fresh_units(projection.shape[0])
                ledger.unify(projection.labels[0], (out.reshape(-1, 1),))
            ledger.unify(w_hh.labels[1], (out.reshape(1, -1),))
            cell = Value((hidden,), ((units,),), ("",))
            ledger.observe(cell)
            for state in states:
                first = views.take(ledger, state, 0, layer * directions + direction)
                batch = _tied_state(call, first, (units if state.shape[-1] == hidden else out,), batch)
            outs.append(Value((len(out),), ((out,),), ("",)))
            cells.append(cell)
        finals += outs
        source = outs[0] if directions == 1 else views.concatenate(ledger, outs, 0)
    frame = [1] * (len(call.outputs[0]) - 1) + [source.shape[0]]
    laid = views.reshape(ledger, source, frame)
    sequence = replace(laid, shape=call.outputs[0], reasons=("time step",) * (len(frame) - 1) + laid.reasons[-1:])
    if value.ndim == 3:
        sequence = _of_samples(sequence, samples, batch)
    return [sequence, *(_final_state(call, k, cells, finals, batch) for k in range(1, len(call.outputs)))]


def _gates(call: Call, gates: int, source: Value, w_ih: Value, w_hh: Value, biases: list[Value]) -> Array:
    """Fresh hidden units, which index the rows of every gate and do not scale; the input's units index the columns."""
    ledger = call.ledger
    hidden = w_hh.shape[0] // gates
    units = ledger.fresh_units(hidden)
    slots = np.tile(units, gates), np.repeat(-1 - np.arange(gates), hidden)
    for w in (w_ih, w_hh, *biases):
        gate = tuple(along(s, 0, w.ndim) for s in slots) if gates > 1 else (along(units, 0, w.ndim),)
        ledger.pin_scale(w.scale if w is not w_ih else tuple(t for t in w.scale if t[1].shape[0] > 1))
        ledger.relabel(w, 0, gate)
    incoming = tuple(c.reshape(1, -1) for c in source.labels[0])
    ledger.unify(w_ih.labels[1], incoming, "", source.reasons[0])
    terms = tuple((c, v.reshape(1, -1)) for c, v in source.scale)
    ledger.pin_scale((*(t for t in w_ih.scale if t[1].shape[1] > 1), *terms))
    return units


@register_rule("_pack_padded_sequence")
def _pack(call: Call) -> list[Value]:
    """The steps of all sequences, one below the other, and how many sequences each step has (their lengths tell)."""
    ledger, value = call.ledger, call["input"]
    ledger.pin(call["lengths"], "lengths of sequences")
    for _ in range(2):
        value = views.drop(ledger, views.mix(ledger, value, 0, "packed"), 0)
    laid = views.reshape(ledger, value, (1, *value.shape))
    packed = replace(laid, shape=call.outputs[0], reasons=("packed", *laid.reasons[1:]))
    return [packed, pinned_value(call.outputs[1], "lengths of sequences")]


@register_rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _cell(call: Call) -> Value | list[Value]:
    """One step: the new states are indexed by the hidden units, as the old ones are."""
    ledger = call.ledger
    gates = {"aten.lstm_cell": 4, "aten.gru_cell": 3}.get(call.operator, 1)
    value = views.unnest(ledger, call["input"], call["input"].ndim - 1)
    batch = (value.labels[0], value.reasons[0]) if value.ndim == 2 else ((), "")
    label, terms = views.channel(ledger, value, value.ndim - 1)
    source = Value((value.shape[-1],), (label,), (value.reasons[-1],), terms)
    biases = [b for b in (call.get("b_ih"), call.get("b_hh")) if b is not None]
    units = _gates(call, gates, source, call["w_ih"], call["w_hh"], biases)
    ledger.unify(call["w_hh"].labels[1], (units.reshape(1, -1),))
    for state in call["hx"] if isinstance(call["hx"], (list, tuple)) else [call["hx"]]:
        batch = _tied_state(call, state, (units,), batch)
    cell = Value((len(units),), ((units,),), ("",))
    ledger.observe(cell)
    states = [_of_cells(call, cell, shape, batch) for shape in call.outputs]
    return states if len(states) > 1 else states[0]


Samples = tuple[Label, str]  # the label of the axis of samples, and why it is pinned


def _of_samples(value: Value, axis: int, batch: Samples) -> Value:
    """The value with the label of the samples, which an operator passes on as they are, along one of its axes."""
    label = tuple(c.reshape([-1 if k == axis else 1 for k in range(value.ndim)]) for c in batch[0])
    return value.with_axis(axis, label=label, reason=batch[1])


def _of_cells(call: Call, cell: Value, shape: tuple[int, ...], batch: Samples) -> Value:
    """States ``[..., samples, hidden]``, or ``[..., hidden]`` where there is one sample."""
    laid = views.reshape(call.ledger, cell, [1] * (len(shape) - 1) + [cell.shape[0]])
    states = replace(laid, shape=shape)
    return _of_samples(states, len(shape) - 2, batch) if len(shape) > 1 and batch[0] else states


def _final_state(call: Call, position: int, cells: list[Value], outs: list[Value], batch: Samples) -> Value:
    """The states after the last step: indexed by the hidden units where there is one layer, pinned where several."""
    shape = call.outputs[position]
    states = outs if position == 1 else cells
    if len(states) > 1:
        reason = "final states of several layers are stacked"
        if position in call.used:
            for state in states:
                call.ledger.pin(state, reason)
            call.ledger.pin_label(batch[0], reason)
        return pinned_value(shape, reason)
    return _of_cells(call, states[0], shape, batch)


def _tied_state(call: Call, state: Value, units: Label, batch: Samples) -> Samples:
    """Tie an initial state ``[samples, hidden]``, or ``[hidden]``, which must not scale; the samples to go on with."""
    ledger = call.ledger
    ledger.pin_scale(state.scale)
    for axis in range(state.ndim):
        state = views.unnest(ledger, state, axis)
    frame = tuple(c.reshape([1] * (state.ndim - 1) + [-1]) for c in units)
    ledger.unify(state.labels[-1], frame, state.reasons[-1], "")
    if state.ndim < 2 or state.shape[0] == 1:
        return batch
    label = tuple(c.reshape(-1) for c in state.labels[0])
    whole = tuple(c.reshape(-1) for c in batch[0])
    return ledger.unify(whole, label, batch[1], state.reasons[0]), batch[1] or state.reasons[0]
