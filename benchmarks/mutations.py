"""Mutations of the code, and whether the tests that should catch each of them do.

    python benchmarks/mutations.py [NUMBER …]   applies each in a copy of the checkout and runs its tests
    python benchmarks/mutations.py --check      says which no longer fit the code; exit 1 if any

A mutation is what a slip of the hand would do: another operator, a dropped term, a swapped axis, a
wrong spec, a missing check. One whose tests still pass is a gap in the tests. Each runs only the
test files that it names, whole, until the first failure: about half an hour on two cores.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """One change of one file.

    - `file`: its path in the repository.
    - `old`, `new`: the text that is replaced wherever it stands in the file, and what it becomes.
    - `tests`: the names of the test files that should catch it.
    """

    file: str
    old: str
    new: str
    tests: str


MUTATIONS = (
    Mutation(
        "nnx_pipeline/pipeline/circular/_tick.py",
        "shift(leaf, by=1, how=shift_by)",
        "shift(leaf, by=-1, how=shift_by)",
        "test_pipeline",
    ),
    Mutation(
        "nnx_pipeline/pipeline/circular/_tick.py",
        "x = exchange.where(first, entering, arrived)",
        "x = exchange.where(last, entering, arrived)",
        "test_pipeline",
    ),
    Mutation(
        "nnx_pipeline/pipeline/circular/_tick.py",
        "    x = exchange.where(exchange.over_stage(now.active), x, waiting)\n",
        "",
        "test_pipeline",
    ),
    Mutation(
        "nnx_pipeline/pipeline/circular/_tick.py",
        "queue = exchange.push(queue, returning, carry.outputs[-1],",
        "queue = exchange.push(queue, returning, carry.outputs[0],",
        "test_pipeline",
    ),
    Mutation(
        "nnx_pipeline/pipeline/circular/_tick.py",
        "from_stream=jnp.asarray(tick < schedule.microbatches)",
        "from_stream=jnp.asarray(tick <= schedule.microbatches)",
        "test_pipeline",
    ),
    Mutation(
        "nnx_pipeline/pipeline/circular/_tick.py",
        "tick % schedule.stream_slots",
        "(tick + 1) % schedule.stream_slots",
        "test_pipeline",
    ),
    Mutation(
        "nnx_pipeline/pipeline/circular/run.py",
        "jnp.roll(stream, -late, axis=1)",
        "jnp.roll(stream, late, axis=1)",
        "test_pipeline",
    ),
    Mutation(
        "nnx_pipeline/pipeline/circular/_backward.py",
        "add(after.others, d_others)",
        "d_others",
        "test_pipeline test_closed_over",
    ),
    Mutation(
        "nnx_pipeline/pipeline/visit.py",
        "add_at_repeat(totals, d_weights, over_stage(repeat))",
        "add_at_repeat(totals, d_weights, over_stage(0 * repeat))",
        "test_pipeline test_one_f_one_b",
    ),
    Mutation(
        "nnx_pipeline/pipeline/circular/_backward.py",
        "self._gather(params, repeat + 1)",
        "self._gather(params, repeat)",
        "test_model test_option_pairs",
    ),
    Mutation(
        "nnx_pipeline/pipeline/circular/_backward.py",
        "return now.repeat == now.repeat[0]",
        "return now.repeat != now.repeat[0]",
        "test_model test_option_pairs",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/apply.py",
        "jax.lax.dynamic_index_in_dim(leaf, index[0], axis=0)",
        "jax.lax.dynamic_index_in_dim(leaf, 0 * index[0], axis=0)",
        "test_pipeline",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/apply.py",
        "leaf.at[repeat].set(new[None]",
        "leaf.at[repeat].add(new[None]",
        "test_pipeline test_one_f_one_b",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/_checks.py",
        "        if jnp.shape(leaf)[:2] != want:",
        "        if False:",
        "test_stage_checks test_pipeline",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/_checks.py",
        "    if changed and (before",
        "    if False and (before",
        "test_stage_checks",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/layers.py",
        '{"keys": fold_in(keys, number)}',
        '{"keys": keys}',
        "test_dropout",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/layers.py",
        "return [self.remat.checkpoint(call, in_scan=in_scan)]",
        "return [call]",
        "test_remat",
    ),
    Mutation(
        "nnx_pipeline/pipeline/_runner.py",
        "saved_in_stage=(LAYER_METRICS, LAYER_INPUT) if inputs else (LAYER_METRICS,)",
        "saved_in_stage=(LAYER_METRICS,)",
        "test_remat",
    ),
    Mutation(
        "nnx_pipeline/pipeline/_runner.py",
        "self.layout.gathered(gathered_axes(self.config))",
        "self.layout",
        "test_collectives test_model",
    ),
    Mutation(
        "nnx_pipeline/pipeline/_runner.py",
        'copies |= {"data", *gathered_axes(config)}',
        "copies |= {*gathered_axes(config)}",
        "test_zero test_collectives test_model",
    ),
    Mutation(
        "nnx_pipeline/pipeline/gather.py",
        "return jax.lax.psum(leaf, rest) if rest else leaf",
        "return leaf",
        "test_model test_option_pairs",
    ),
    Mutation(
        "nnx_pipeline/pipeline/gather.py",
        "_scatter(leaf, axis, name, summed=name in self.copies)",
        "_scatter(leaf, axis, name, summed=False)",
        "test_model test_option_pairs",
    ),
    Mutation(
        "nnx_pipeline/pipeline/_zero1.py",
        "gradient = jax.lax.psum(gradient, self.over)",
        "pass",
        "test_zero",
    ),
    Mutation(
        "nnx_pipeline/pipeline/_zero1.py",
        ".astype(self.dtype or dtype)",
        "",
        "test_zero",
    ),
    Mutation(
        "nnx_pipeline/pipeline/one_f_one_b/_tick.py",
        "return loss + new_loss, so_far, d_output",
        "return new_loss, so_far, d_output",
        "test_one_f_one_b",
    ),
    Mutation(
        "nnx_pipeline/pipeline/one_f_one_b/_tick.py",
        "shift(leaf, by=-1, how=self.shift_by)",
        "shift(leaf, by=1, how=self.shift_by)",
        "test_one_f_one_b",
    ),
    Mutation(
        "nnx_pipeline/pipeline/one_f_one_b/_tick.py",
        "        d_y = exchange.where(is_backward, d_y, jax.tree.map(jnp.zeros_like, d_y))\n",
        "",
        "test_one_f_one_b",
    ),
    Mutation(
        "nnx_pipeline/pipeline/one_f_one_b/_tick.py",
        "weight / self.visits if isinstance(metric, Mean) else weight",
        "weight",
        "test_metrics test_one_f_one_b",
    ),
    Mutation(
        "nnx_pipeline/pipeline/one_f_one_b/_loop.py",
        "jnp.sum(leaf, axis=0), state.gradients.captured",
        "leaf[0], state.gradients.captured",
        "test_closed_over",
    ),
    Mutation(
        "nnx_pipeline/pipeline/one_f_one_b/_state.py",
        "write=indices(schedule.written)",
        "write=indices(0 * schedule.written)",
        "test_one_f_one_b",
    ),
    Mutation(
        "nnx_pipeline/pipeline/schedule.py",
        "heapq.heappush(taken, (visit + ticks, slots[-1]))",
        "heapq.heappush(taken, (visit + ticks - 1, slots[-1]))",
        "test_one_f_one_b_schedule",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/layers.py",
        "return cls(layer, visit % stack.stages, visit // stack.stages)",
        "return cls(layer, layer % stack.stages, visit // stack.stages)",
        "test_foreign_layers",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/layers.py",
        "real = number < stack.layers",
        "real = number <= stack.layers",
        "test_kinds_of_layers",
    ),
    Mutation(
        "nnx_pipeline/pipeline/metrics.py",
        "_map(lambda metric: _added(_finished(metric), counted, layers)",
        "_map(lambda metric: _added(_finished(metric), None, layers)",
        "test_kinds_of_layers",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/layers.py",
        "counts=[stack.count(kind) / calls for",
        "counts=[stack.per_stage / stack.kinds for",
        "test_kinds_of_layers",
    ),
    Mutation(
        "nnx_pipeline/pipeline/_stack.py",
        "reshape(self.repeats, self.stages, -1)[:, :, kind :: self.kinds]",
        "reshape(self.repeats, self.stages, -1)[:, :, :: self.kinds]",
        "test_kinds_of_layers",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/layers.py",
        'if not variable.get_metadata().get("gather_at_use"):',
        "if True:",
        "test_foreign_layers",
    ),
    Mutation(
        "nnx_pipeline/pipeline/_entry.py",
        "if shape is None or shape[:1] != (batch,):",
        "if shape is None:",
        "test_wrong_uses",
    ),
    Mutation(
        "nnx_pipeline/config/pipeline.py",
        "return stages > 1 or self.microbatches_on(stages) > 1 or self.accumulates",
        "return stages > 1 or self.accumulates",
        "test_model",
    ),
    Mutation(
        "nnx_pipeline/pipeline/_exchange.py",
        "moved = where(last, new, shift(column, by=-1, how=how))",
        "moved = where(last, new, column)",
        "test_pipeline",
    ),
    Mutation(
        "nnx_pipeline/ops/_norm.py",
        "axis=axes, keepdims=True) + epsilon)",
        "axis=axes, keepdims=True)) + epsilon",
        "test_ops",
    ),
    Mutation(
        "nnx_pipeline/ops/_self_attention/rotary.py",
        "second * cosine + first * sine",
        "second * cosine - first * sine",
        "test_ops",
    ),
    Mutation(
        "nnx_pipeline/ops/_router.py",
        "weights = jax.nn.softmax(top, axis=-1)",
        "weights = jax.nn.sigmoid(top)",
        "test_ops test_checkpoint_load",
    ),
    Mutation(
        "nnx_pipeline/ops/_router.py",
        "return num_experts * jnp.sum(",
        "return jnp.sum(",
        "test_ops test_metrics",
    ),
    Mutation(
        "nnx_pipeline/ops/_experts.py",
        "weighed(products.open_up(x, gate, up, biases), weight)",
        "products.open_up(x, gate, up, biases)",
        "test_ops test_model",
    ),
    Mutation(
        "nnx_pipeline/ops/_experts.py",
        "(-2, -3), (0, 1)",
        "(-3, -2), (0, 1)",
        "test_model",
    ),
    Mutation(
        "nnx_pipeline/ops/_attention.py",
        "weights * (d_weights.astype(jnp.float32) - inner[:, :, start:stop])",
        "weights * d_weights.astype(jnp.float32)",
        "test_ops test_model",
    ),
    Mutation(
        "nnx_pipeline/ops/_attention.py",
        "total.at[:, : new.shape[1]].add(new)",
        "total.at[:, : new.shape[1]].set(new)",
        "test_ops",
    ),
    Mutation(
        "nnx_pipeline/ops/_attention.py",
        "reversed(_blocks(length, size))",
        "reversed(_blocks(length, length))",
        "test_ops",
    ),
    Mutation(
        "nnx_pipeline/train/step.py",
        "updates.whole() if model.zero1 else updates",
        "updates",
        "test_zero",
    ),
    Mutation(
        "nnx_pipeline/lab/compile/_settings.py",
        "for part in (sets, own):",
        "for part in (own, sets):",
        "test_compiler_settings",
    ),
    Mutation(
        "nnx_pipeline/lab/compile/_compiler.py",
        "if not setting.of_set:",
        "if False:",
        "test_compiler_settings",
    ),
    Mutation(
        "nnx_pipeline/lab/compile/_cache_key.py",
        "*map(key_text, platform.xla)]",
        "]",
        "test_compiler_settings",
    ),
    Mutation(
        "nnx_pipeline/lab/_baseline/environment.py",
        "building.rename(home)",
        "pass",
        "test_across",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/_repeats.py",
        "add(tree, where(repeat == number, gradients, zeros))",
        "add(tree, gradients)",
        "test_pipeline test_model",
    ),
    Mutation(
        "nnx_pipeline/pipeline/gather.py",
        "leaf = self._scattered(leaf, axis - 1, names)",
        "leaf = self._scattered(leaf, axis - 1, names) * 0",
        "test_model test_pipeline",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/layers.py",
        "            x, layer = await_gradient(x, layer)\n",
        "",
        "test_remat",
    ),
    Mutation(
        "nnx_pipeline/ops/_attention.py",
        "readable = query >= key",
        "readable = query > key",
        "test_ops",
    ),
    Mutation(
        "nnx_pipeline/ops/_attention.py",
        "return readable & (queries.segments[:, :, None] == keys.segments[:, None, :])",
        "return readable",
        "test_ops test_model",
    ),
    Mutation(
        "nnx_pipeline/sharding/dropout.py",
        "x / (1.0 - rate)",
        "x",
        "test_dropout",
    ),
    Mutation(
        "nnx_pipeline/ops/_residual.py",
        "return constrain(stream + update, spec)",
        "return constrain(update, spec)",
        "test_model",
    ),
    Mutation(
        "nnx_pipeline/train/optimizer.py",
        "jnp.where(norm < largest, leaf, scaled)",
        "jnp.where(norm > largest, leaf, scaled)",
        "test_train test_grad_dtype",
    ),
    Mutation(
        "nnx_pipeline/train/optimizer.py",
        "b2=config.adam_b2",
        "b2=config.adam_b1",
        "test_train",
    ),
    Mutation(
        "nnx_pipeline/train/step.py",
        "batch.weights / (jnp.sum(batch.weights) + 1e-8)",
        "batch.weights",
        "test_train test_model test_train_state",
    ),
    Mutation(
        "nnx_pipeline/sharding/layout.py",
        "return tuple(axis for axis in mesh_axes if sizes.get(axis, 1) > 1)",
        "return tuple(axis for axis in mesh_axes[:1] if sizes.get(axis, 1) > 1)",
        "test_model test_loss",
    ),
    Mutation(
        "nnx_pipeline/lab/comparison/outcome.py",
        "abs(after - before) < NO_EFFECT * before",
        "abs(after - before) > NO_EFFECT * before",
        "test_numerics test_account",
    ),
    Mutation(
        "nnx_pipeline/lab/comparison/_numerics.py",
        "all(each <= tolerance for each in relative.values())",
        "any(each <= tolerance for each in relative.values())",
        "test_numerics test_arms",
    ),
    Mutation(
        "nnx_pipeline/lab/compile/_cache_key.py",
        "parts.append(cpu_text())",
        "pass",
        "test_cache",
    ),
    Mutation(
        "nnx_pipeline/lab/attribution/account.py",
        "return own + self.constant_bytes + self.heap_bytes",
        "return own + self.heap_bytes",
        "test_account",
    ),
    Mutation(
        "nnx_pipeline/lab/_hlo/loops.py",
        "times * trips",
        "times",
        "test_hlo",
    ),
    Mutation(
        "nnx_pipeline/lab/_hlo/loops.py",
        "        if not isinstance(choice, int):\n            return None\n",
        "        if not isinstance(choice, int):\n            continue\n",
        "test_branches",
    ),
    Mutation(
        "nnx_pipeline/lab/_hlo/loops.py",
        "found[key] = shares if found.get(key, shares) == shares else None",
        "found[key] = shares",
        "test_branches",
    ),
    Mutation(
        "nnx_pipeline/lab/_hlo/integers.py",
        "return before.dtype == after.dtype and not any(is_long)",
        "return not any(is_long)",
        "test_branches",
    ),
    Mutation(
        "nnx_pipeline/lab/_hlo/integers.py",
        "return before.dtype == after.dtype and not any(is_long)",
        "return before.dtype == after.dtype",
        "test_branches",
    ),
    Mutation(
        "nnx_pipeline/lab/_hlo/integers.py",
        "start = min(max(start, 0), len(entries) - shape.elements)",
        "start = start",
        "test_branches",
    ),
    Mutation(
        "nnx_pipeline/lab/_timing/schedule.py",
        "            if shares is not None:\n",
        "            if False:\n",
        "test_branches",
    ),
    Mutation(
        "nnx_pipeline/lab/_hlo/products.py",
        "first_output = max(0, -(offset // stride))",
        "first_output = 0",
        "test_hlo",
    ),
    Mutation(
        "nnx_pipeline/lab/lint/_rules_arrays.py",
        "            if size.bytes >= limit:\n",
        "            if size.bytes > limit:\n",
        "test_lint",
    ),
    Mutation(
        "nnx_pipeline/lab/lint/_rules_loops.py",
        "if size.bytes >= limit and program.is_parameter(entry):",
        "if size.bytes < limit and program.is_parameter(entry):",
        "test_lint",
    ),
    Mutation(
        "nnx_pipeline/config/_fields.py",
        "one_of(field.name, getattr(config, field.name), choices)",
        "pass",
        "test_config",
    ),
    Mutation(
        "nnx_pipeline/lab/_tracing/nnx_state.py",
        "raise InputError(",
        "print(",
        "test_nnx_steps",
    ),
    Mutation(
        "linen_compat/formats/_orbax/arrays.py",
        "sums[number] != checksum(values)",
        "False",
        "test_checksums",
    ),
    Mutation(
        "linen_compat/formats/_parallel.py",
        "self._taken + nbytes <= self._most",
        "True",
        "test_parallel",
    ),
    Mutation(
        "linen_compat/formats/_orbax/corruption.py",
        "custom.get(_CHECKSUM) != _checksum(values)",
        "False",
        "test_checksums test_damage",
    ),
    Mutation(
        "linen_compat/formats/_in_memory.py",
        "return 3 if path.startswith(LAYERS)",
        "return 2 if path.startswith(LAYERS)",
        "test_checkpoint_load",
    ),
    Mutation(
        "linen_compat/formats/_orbax/layouts.py",
        "if self.format == SCANNED or names.is_early:\n            index",
        "if self.format == SCANNED:\n            index",
        "test_deepseek_checkpoints",
    ),
    Mutation(
        "linen_compat/maxtext/_deepseek.py",
        'return {"router_bias_in_weights": values["routed_bias"]}',
        "return {}",
        "test_deepseek_checkpoints",
    ),
    Mutation(
        "linen_compat/modules/_stacked.py",
        "jnp.moveaxis(leaves[0], 1, 0)",
        "jnp.moveaxis(leaves[0], 1, 0)[::-1]",
        "test_deepseek_linen",
    ),
    Mutation(
        "linen_compat/formats/huggingface/_rope.py",
        'return _mscale(rope["factor"], rope["mscale_all_dim"]) ** 2',
        'return _mscale(rope["factor"], rope["mscale_all_dim"])',
        "test_huggingface_config test_huggingface",
    ),
    Mutation(
        "linen_compat/modules/_stacked.py",
        "return jnp.stack(leaves, axis=2)",
        "return jnp.stack(leaves[::-1], axis=2)",
        "test_linen_pipeline test_linen_trees",
    ),
    Mutation(
        "linen_compat/modules/embedding.py",
        '("vocab", "embed_vocab")',
        '("embed_vocab", "vocab")',
        "test_linen_trees test_linen_modules",
    ),
    Mutation(
        "linen_compat/formats/_streams.py",
        "array = times_ratio(array, ratio)",
        "pass",
        "test_convert test_checkpoint_save",
    ),
    Mutation(
        "nnx_pipeline/pipeline/_stacked.py",
        "over=(*over, *self.weights.zero1)",
        "over=over",
        "test_zero",
    ),
    Mutation(
        "nnx_pipeline/pipeline/_zero1.py",
        "    refuse_perturbed(_BOTH, whole)\n    return values_of(shards), None",
        "    return values_of(shards), None",
        "test_zero",
    ),
    Mutation(
        "nnx_pipeline/ops/_experts.py",
        "gate, up, down = (cast_at_use(kernel, dtype) for kernel in kernels)",
        "gate, up, down = kernels",
        "test_grad_dtype",
    ),
    Mutation(
        "nnx_pipeline/ops/_experts.py",
        "if not is_explicit():  # in explicit mode",
        "if False:  # in explicit mode",
        "test_ops",
    ),
    Mutation(
        "nnx_pipeline/ops/_experts.py",
        "used = out_sharding(self._used)\n        gradient",
        "used = out_sharding(self._stored)\n        gradient",
        "test_ops",
    ),
    Mutation(
        "nnx_pipeline/lab/attribution/_roles.py",
        "exchanged and self._has_backward and",
        "exchanged and",
        "test_attribution",
    ),
    Mutation(
        "nnx_pipeline/ops/_experts.py",
        'if ambient_platform() == "cpu":',
        "if False:",
        "test_ops",
    ),
    Mutation(
        "nnx_pipeline/ops/_experts.py",
        "return d_x, products.kernel_gradient(x, cotangent)",
        "return d_x, 2 * products.kernel_gradient(x, cotangent)",
        "test_ops",
    ),
    Mutation(
        "nnx_pipeline/lab/attribution/_roles.py",
        '[-1]) == "all-to-all"',
        '[-1]) == "broadcast"',
        "test_attribution",
    ),
    Mutation(
        "nnx_pipeline/lab/comparison/outcome.py",
        'if outcome.verdict_by("account") != "no effect":',
        "if False:",
        "test_account",
    ),
    Mutation(
        "nnx_pipeline/experiments/bound/_moments.py",
        "as_shards = sizes.gathers_first or not sizes.in_loop",
        "as_shards = not sizes.in_loop",
        "test_floor",
    ),
    Mutation(
        "nnx_pipeline/lab/_ending.py",
        "        tempfile.gettempdir()\n",
        "        pass\n",
        "test_interrupt",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/state.py",
        "        new = where(at.active, new, select_repeat(before, row))\n",
        "",
        "test_layer_state",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/state.py",
        "select_repeat(first, at.repeat))",
        "select_repeat(now, at.repeat))",
        "test_layer_state",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/variables.py",
        "if is_state(variable) else _as_bits(variable)",
        "if is_state(variable) else variable",
        "test_layer_state",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/state.py",
        "return select_repeat(now.value, at.row)",
        "return select_repeat(now.value, 0 * at.row)",
        "test_layer_state",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/variables.py",
        "else jnp.mean(stored, axis=2)",
        "else stored[:, :, -1]",
        "test_layer_state",
    ),
    Mutation(
        "nnx_pipeline/pipeline/one_f_one_b/_tick.py",
        "_add_rows(of_inputs.side, d_reads.side, exchange.over_stage(now.backward))",
        "_add_rows(of_inputs.side, d_reads.side, exchange.over_stage(now.forward))",
        "test_foreign_models",
    ),
    Mutation(
        "nnx_pipeline/pipeline/one_f_one_b/_tick.py",
        "return d_weights, _add_row(d_rows, d_row, now.returning)",
        "return d_weights, _add_row(d_rows, d_row, now.entering)",
        "test_foreign_models",
    ),
    Mutation(
        "nnx_pipeline/pipeline/one_f_one_b/_tick.py",
        "layers=put(state.layers, at, written)",
        "layers=put(state.layers, at._replace(repeat=0 * at.repeat), written)",
        "test_layer_state",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/_checks.py",
        "        if id(leaf) in others:\n",
        "        if False:\n",
        "test_stage_checks",
    ),
    Mutation(
        "nnx_pipeline/pipeline/layers.py",
        "        checks.check_same(layer, other)\n",
        "",
        "test_wrong_uses",
    ),
    Mutation(
        "nnx_pipeline/pipeline/_stacked.py",
        "config.num_microbatches is None and default > 1",
        "config.num_microbatches is None and default > 2",
        "test_layer_state",
    ),
    Mutation(
        "nnx_pipeline/pipeline/_timetable/actions.py",
        "ends = np.isin(self.kind, (BACKWARD, OF_WEIGHTS))",
        "ends = np.isin(self.kind, (BACKWARD, OF_INPUT))",
        "test_timetable_csv",
    ),
    Mutation(
        "nnx_pipeline/ops/_grouped/order.py",
        "jnp.where((places < order.used)[:, None], picked, 0)",
        "picked",
        "test_grouped_experts",
    ),
    Mutation(
        "nnx_pipeline/ops/_by_choice.py",
        "return jax.lax.psum(gradient, rest) if rest else gradient",
        "return gradient",
        "test_grouped_experts",
    ),
    Mutation(
        "nnx_pipeline/ops/_by_choice.py",
        "return jax.lax.psum(y, self.mlp) if self.mlp else y",
        "return y",
        "test_grouped_experts",
    ),
    Mutation(
        "nnx_pipeline/ops/_grouped/by_triton.py",
        "mine = ((row >= start) & (row < end))[:, None]",
        "mine = (row >= start)[:, None]",
        "test_grouped_experts",
    ),
    Mutation(
        "nnx_pipeline/ops/_grouped/experts.py",
        "again = self.group is None and local >= MANY",
        "again = local >= MANY",
        "test_grouped_experts",
    ),
    Mutation(
        "nnx_pipeline/ops/_experts.py",
        "kernels = ExpertKernels(*held)",
        "pass",
        "test_stored_order",
    ),
    Mutation(
        "nnx_pipeline/ops/_capacity.py",
        "sort_by_expert(experts.T,",
        "sort_by_expert(experts.reshape(experts.T.shape),",
        "test_capacity_experts",
    ),
    Mutation(
        "nnx_pipeline/ops/_capacity.py",
        "rank < capacity,",
        "rank <= capacity,",
        "test_capacity_experts",
    ),
    Mutation(
        "nnx_pipeline/ops/_capacity.py",
        "split_axis=1, concat_axis=0",
        "split_axis=0, concat_axis=1",
        "test_capacity_experts",
    ),
    Mutation(
        "nnx_pipeline/ops/_router.py",
        "softmax * log_sum**2)",
        "softmax * log_sum)",
        "test_ops",
    ),
    Mutation(
        "nnx_pipeline/train/optimizer.py",
        "        if not isinstance(leaf, SelectionBias):\n            return leaf\n",
        "        return leaf\n",
        "test_train",
    ),
    Mutation(
        "nnx_pipeline/ops/_attention.py",
        "1 - jnp.square(capped.astype(jnp.float32) / cap)",
        "1 - capped.astype(jnp.float32) / cap",
        "test_fast_attention test_loss",
    ),
    Mutation(
        "nnx_pipeline/ops/_loss.py",
        "            d_logits *= soft_cap_slope(logits, plan.cap)\n",
        "            pass\n",
        "test_loss",
    ),
    Mutation(
        "nnx_pipeline/ops/_low_precision.py",
        'dtypes = f"{result},{of_kernel}->{of_x}", (kind.cotangents, kind.values)',
        'dtypes = f"{result},{of_kernel}->{of_x}", (kind.values, kind.values)',
        "test_low_precision",
    ),
    Mutation(
        "nnx_pipeline/ops/_low_precision.py",
        "if axis in result]\n            # The scales",
        "if axis not in result]\n            # The scales",
        "test_low_precision",
    ),
    Mutation(
        "nnx_pipeline/ops/_attention.py",
        "readable = behind >= 0",
        "readable = behind > 0",
        "test_generate",
    ),
    Mutation(
        "nnx_pipeline/ops/_attention.py",
        "readable &= behind < options.window",
        "readable &= behind <= options.window",
        "test_generate",
    ),
    Mutation(
        "nnx_pipeline/generate/loop.py",
        "positions=positions[:, None])",
        "positions=positions[:, None] + 1)",
        "test_generate",
    ),
    Mutation(
        "nnx_pipeline/generate/loop.py",
        "at=lengths - 1",
        "at=lengths * 0 + tokens.shape[1] - 1",
        "test_generate",
    ),
    Mutation(
        "nnx_pipeline/generate/sampling.py",
        "rest > (1 - sampling.top_p) * rest[:, :1]",
        "rest - likely > (1 - sampling.top_p) * rest[:, :1]",
        "test_generate",
    ),
    Mutation(
        "nnx_pipeline/generate/sampling.py",
        "logits / sampling.temperature",
        "logits * sampling.temperature",
        "test_generate",
    ),
    Mutation(
        "nnx_pipeline/train/loop.py",
        "batches(config, mesh, source, first=done)",
        "batches(config, mesh, source)",
        "test_resume",
    ),
    Mutation(
        "nnx_pipeline/train/_saved.py",
        "if name not in how",
        "if name in how",
        "test_resume",
    ),
    Mutation(
        "nnx_pipeline/train/processes.py",
        "if differ.any():",
        "if differ.all():",
        "test_train_processes",
    ),
    Mutation(
        "nnx_pipeline/train/processes.py",
        "if jax.distributed.is_initialized():  # JAX",
        "if jax.process_count() > 1:  # JAX",
        "test_train_processes",
    ),
    Mutation(
        "nnx_pipeline/train/_cli/saving.py",
        "step % every == 0",
        "step % every == 1",
        "test_resume",
    ),
    Mutation(
        "nnx_pipeline/train/_held_out.py",
        "mean * targets, weight",
        "mean, weight",
        "test_text",
    ),
    Mutation(
        "nnx_pipeline/train/_packing.py",
        "is_filled[:, 1:] & ~begins[:, 1:]",
        "is_filled[:, 1:]",
        "test_packing",
    ),
    Mutation(
        "nnx_pipeline/train/_packing.py",
        "self._number(batch * self.batch_size + row)",
        "self._number(batch + row)",
        "test_packing",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/layers.py",
        "in_scan = jax.tree.leaves(layers)[0].shape[0] > 1",
        "in_scan = True",
        "test_remat",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/_early.py",
        "jnp.arange(self.first, self.first + self.number, dtype=jnp.int32)",
        "jnp.arange(self.number, dtype=jnp.int32)",
        "test_early_layers",
    ),
    Mutation(
        "nnx_pipeline/ops/_self_attention/rotary.py",
        "math.floor(limits[0]), math.ceil(limits[1])",
        "math.floor(limits[0]), math.floor(limits[1])",
        "test_families",
    ),
    Mutation(
        "nnx_pipeline/ops/_self_attention/latent.py",
        "turned = latent.rotate(narrow[..., None, rank:], positions)",
        "turned = narrow[..., None, rank:]",
        "test_families",
    ),
    Mutation(
        "nnx_pipeline/ops/_router.py",
        "weighed = scores + bias if bias is not None and routing.weighs_bias else wide",
        "weighed = scores if bias is not None and routing.weighs_bias else wide",
        "test_families",
    ),
    Mutation(
        "nnx_pipeline/pipeline/stage/_split.py",
        "value / self.parts if is_mean else value",
        "value",
        "test_batch_split",
    ),
    Mutation(
        "nnx_pipeline/config/model.py",
        "full = dataclasses.replace(windowed, sliding_window=None)",
        "full = windowed",
        "test_mixed_windows",
    ),
)


def main() -> None:
    missing = [one for one in MUTATIONS if one.old not in (ROOT / one.file).read_text("utf-8")]
    for one in missing:
        print(f"not in {one.file}: {one.old!r}")
    if missing or sys.argv[1:] == ["--check"]:
        sys.exit(bool(missing))
    numbers = [int(number) for number in sys.argv[1:]] or range(len(MUTATIONS))
    print("| # | file | text | becomes | caught by |\n|--:|---|---|---|---|", flush=True)
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".git", "__pycache__"))
        for number in numbers:
            one = MUTATIONS[number]
            by = caught_by(one, copy)
            survivors += not by
            cells = (one.file, shown(one.old), shown(one.new), by or "**nothing**")
            print(f"| {number} | {' | '.join(cells)} |", flush=True)
    print(f"\n{len(numbers) - survivors} of {len(numbers)} are caught")
    sys.exit(bool(survivors))


def caught_by(one: Mutation, copy: Path) -> str:
    """The first test that fails with the mutation, "" if none does.

    - `copy`: a copy of the checkout, in which the mutation is applied and taken back.
    """
    whole = (ROOT / one.file).read_text("utf-8")
    (copy / one.file).write_text(whole.replace(one.old, one.new), "utf-8")
    options = ("-x", "-q", "-n", "0")
    files = [path for name in one.tests.split() for path in copy.glob(f"tests/*/{name}.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=copy,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(copy)},
    )
    (copy / one.file).write_text(whole, "utf-8")
    if done.returncode not in (0, 1, 5):  # 5: every test of these files is marked slow
        sys.exit(f"pytest ended with {done.returncode} for {one.file}:\n{done.stdout[-2000:]}")
    lines = (line.split()[1] for line in done.stdout.splitlines() if line.startswith("FAILED "))
    return next((f"`{line.removeprefix('tests/')}`" for line in lines), "") or (
        "`an error`" if done.returncode == 1 else ""
    )


def shown(text: str) -> str:
    """A piece of code as a cell of a table, on one line."""
    words = " ".join(text.split()).replace("|", "\\|")
    return f"`{words}`" if words else "nothing"


if __name__ == "__main__":
    main()
