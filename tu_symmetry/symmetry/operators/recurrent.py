"""Rules for recurrent layers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tu_symmetry.symmetry import moving
from tu_symmetry.symmetry.algebra import Array, Value, along, pinned_value
from tu_symmetry.symmetry.rules import Call, register_rule, unknown


@register_rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def _recurrent(call: Call) -> list[Value]:
    ledger = call.ledger
    if "data" in call.arguments and "batch_sizes" in call.arguments:
        return unknown(call)
    gates = {"aten.lstm": 4, "aten.gru": 3}.get(call.operator, 1)
    value = _one_by_one(call, call["input"])
    directions = 2 if call["bidirectional"] else 1
    parameters: list[Value] = list(call["params"])
    states = call["hx"] if isinstance(call["hx"], (list, tuple)) else [call["hx"]]
    layers = int(call["num_layers"])
    each = len(parameters) // (layers * directions)
    label, terms = moving.channel(ledger, value, value.ndim - 1)
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
                _initial_state(
                    call,
                    state,
                    layer * directions + direction,
                    cell if state.shape[-1] == hidden else Value((len(out),), ((out,),), ("",)),
                )
            outs.append(Value((len(out),), ((out,),), ("",)))
            cells.append(cell)
        finals += outs
        source = outs[0] if directions == 1 else moving.concatenate(ledger, outs, 0)
    frame = [1] * (len(call.outputs[0]) - 1) + [source.shape[0]]
    laid = moving.reshape(ledger, source, frame)
    sequence = replace(laid, shape=call.outputs[0], reasons=("time step",) * (len(frame) - 1) + laid.reasons[-1:])
    return [sequence, *(_final_state(call, k, cells, finals) for k in range(1, len(call.outputs)))]


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


@register_rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def _cell(call: Call) -> Value | list[Value]:
    """One step: the new states are indexed by the hidden units, as the old ones are."""
    ledger = call.ledger
    gates = {"aten.lstm_cell": 4, "aten.gru_cell": 3}.get(call.operator, 1)
    value = _one_by_one(call, call["input"])
    label, terms = moving.channel(ledger, value, value.ndim - 1)
    source = Value((value.shape[-1],), (label,), (value.reasons[-1],), terms)
    biases = [b for b in (call.get("b_ih"), call.get("b_hh")) if b is not None]
    units = _gates(call, gates, source, call["w_ih"], call["w_hh"], biases)
    ledger.unify(call["w_hh"].labels[1], (units.reshape(1, -1),))
    for state in call["hx"] if isinstance(call["hx"], (list, tuple)) else [call["hx"]]:
        ledger.pin_scale(state.scale)
        state = _one_by_one(call, state)
        ledger.unify(state.labels[-1], (along(units, state.ndim - 1, state.ndim),), state.reasons[-1], "")
    cell = Value((len(units),), ((units,),), ("",))
    ledger.observe(cell)
    batch = [1] * (value.ndim - 1)
    states = [replace(moving.reshape(ledger, cell, [*batch, len(units)]), shape=shape) for shape in call.outputs]
    return states if len(states) > 1 else states[0]


def _one_by_one(call: Call, value: Value) -> Value:
    """The axes before the last are time steps and samples, in an order that stays."""
    for axis in range(value.ndim - 1):
        value = moving.mix(call.ledger, value, axis, "time step")
    return value


def _final_state(call: Call, position: int, cells: list[Value], outs: list[Value]) -> Value:
    """The states after the last step: indexed by the hidden units where there is one layer, pinned where several."""
    shape = call.outputs[position]
    states = outs if position == 1 else cells
    if len(states) > 1:
        reason = "final states of several layers are stacked"
        if position in call.used:
            for state in states:
                call.ledger.pin(state, reason)
        return pinned_value(shape, reason)
    return replace(moving.reshape(call.ledger, states[0], [1] * (len(shape) - 1) + [states[0].shape[0]]), shape=shape)


def _initial_state(call: Call, state: Value, index: int, cell: Value) -> None:
    """An initial state is indexed by the hidden units, and must not scale."""
    call.ledger.pin_scale(state.scale)
    own = moving.take(call.ledger, state, 0, index)
    own = _one_by_one(call, own)
    frame = tuple(c.reshape([1] * (own.ndim - 1) + [-1]) for c in cell.labels[0])
    call.ledger.unify(own.labels[-1], frame, own.reasons[-1], "")
