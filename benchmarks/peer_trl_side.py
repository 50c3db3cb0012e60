"""TRL's half of `peer_trl.py`: train what a rollart config describes with TRL's `GRPOTrainer`, and write what it took.

Runs in TRL's own environment, with rollart's torch-free modules on PYTHONPATH: tasks, rewards, chat rendering and the
order of seeds are rollart's, so that both sides solve the same problems from the same prompts. Everything else is
TRL's and transformers', set up for speed: float32, no gradient checkpointing, no logging, no checkpoints, fused AdamW,
one padded forward and backward pass per `--micro-batch` trajectories. A task of one turn goes through TRL's own
generation; a task of several through `rollout_func`, which plays all episodes of a batch together and keeps the KV
cache between turns. What this file leaves out: starting it and comparing (`peer_trl.py`).

Shape suffixes: B running episodes, T positions.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from torch import Tensor

from rollart.config import Config, load
from rollart.control.task_source import TaskSource
from rollart.imports import load_object
from rollart.protocols import Env
from rollart.sections import TaskConfig
from rollart.tasks import registry
from rollart.tasks.chat import ChatRenderer
from rollart.types import RewardRequest, TaskSpec


@dataclass
class Task:
    """The only task of a config, its seeds in the order of a rollart run, and the renderer of the model's chat."""

    name: str
    spec: TaskSpec
    config: TaskConfig
    seeds: list[int]
    renderer: ChatRenderer

    @classmethod
    def of(cls, config: Config, model: Path) -> Task:
        specs = registry.specs(config)
        name, spec = next(iter(specs.items()))
        source = TaskSource(config.seed, specs)
        seeds = [source.draw(position)[1] for position in range(config.steps * config.rollout.groups_per_batch)]
        return cls(name, spec, config.tasks[name], seeds, ChatRenderer(model))

    def make_env(self) -> Env:
        return registry.make_env(self.config, self.name)


@dataclass
class Record(transformers.TrainerCallback):
    """What a run took, from the first batch to the last optimizer step: imports and loading are not in it."""

    rewards: list[float] = field(default_factory=list)
    trajectories: int = 0
    trained_tokens: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def batch(self, rewards: Sequence[float], trained_tokens: int) -> None:
        """One generation batch, which is one optimizer step."""
        self.rewards.append(sum(rewards) / len(rewards))
        self.trajectories += len(rewards)
        self.trained_tokens += trained_tokens

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.wall_s, self.cpu_s = -time.perf_counter(), -_cpu_s()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.wall_s += time.perf_counter()
        self.cpu_s += _cpu_s()


def _cpu_s() -> float:
    return sum(os.times()[:4])


# --------------------------------------------------------------------------------------------------------- single turn
class SingleTurn:
    """Prompts for TRL's own generation, and the task's reward as TRL calls it."""

    rollout_func = None

    def __init__(self, task: Task, record: Record) -> None:
        self._task, self._record = task, record
        url = registry.reward_url(task.config, task.name)
        self._score = load_object(url, "reward") if url else None
        self._env = task.make_env()
        observations = [self._env.reset(seed)[0] for seed in task.seeds]
        self.dataset = datasets.Dataset.from_dict(
            {"prompt": [self._messages(text) for text in observations], "observation": observations, "seed": task.seeds}
        )

    def check_rendering(self, tokenizer: Any) -> None:
        """TRL renders prompts with transformers; they must be the tokens that rollart's renderer makes."""
        row = self.dataset[0]
        theirs = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"]
        ours = self._task.renderer.first(self._task.spec.system_prompt, row["observation"])
        if theirs != ours:
            raise SystemExit(f"the two sides render a prompt differently: {theirs} and {ours}")

    def reward(self, *, completions: Any, completion_ids: Any, observation: Any, seed: Any, **_: Any) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        rewards = [self._reward_of(*row) for row in zip(observation, texts, seed, strict=True)]
        self._record.batch(rewards, sum(map(len, completion_ids)))
        return rewards

    def _messages(self, observation: str) -> list[dict[str, str]]:
        system = self._task.spec.system_prompt
        head = [{"role": "system", "content": system}] if system else []
        return [*head, {"role": "user", "content": observation}]

    def _reward_of(self, observation: str, text: str, seed: int) -> float:
        if self._score is not None:
            return self._score(RewardRequest(self._task.name, seed, [observation], [text]))
        self._env.reset(seed)
        return self._env.step(text)[1]


# ---------------------------------------------------------------------------------------------------------- multi turn
@dataclass
class Episode:
    """One trajectory. `completion` is all after the first prompt; `mask` is 1 on the tokens that the model wrote."""

    env: Env
    prompt: list[int]
    new: list[int]
    completion: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False


class MultiTurn:
    """`rollout_func`: all episodes of a batch advance together, one `generate` per turn for those that still run."""

    def __init__(self, task: Task, record: Record) -> None:
        self._task, self._record = task, record
        self.rollout_func = self.play
        # TRL hands a rollout function the prompts alone: a seed in place of a prompt is how an episode is named.
        self.dataset = datasets.Dataset.from_dict({"prompt": [str(seed) for seed in task.seeds]})

    def check_rendering(self, tokenizer: Any) -> None:
        """Both sides use rollart's renderer."""

    def play(self, prompts: list[str], trainer: trl.GRPOTrainer) -> dict[str, Any]:
        """TRL's contract: one list entry per prompt; `env_mask` is TRL's name for the loss mask.

        `logprobs` may be None, as it is for TRL's own `generate`: on-policy training does not read them.
        """
        episodes = [self._begin(int(seed)) for seed in prompts]
        running, batch = episodes, Batch(trainer)
        for turn in range(self._task.spec.max_turns):
            for episode, action in zip(running, batch.generate([episode.new for episode in running]), strict=True):
                self._act(episode, action, turn + 1)
            rows = [row for row, episode in enumerate(running) if not episode.done]
            if not rows:
                break
            running = [running[row] for row in rows]
            batch.keep(rows)
        return {
            "prompt_ids": [episode.prompt for episode in episodes],
            "completion_ids": [episode.completion for episode in episodes],
            "logprobs": None,
            "env_mask": [episode.mask for episode in episodes],
            "episode_reward": [episode.reward for episode in episodes],
            "trained_tokens": [sum(episode.mask) for episode in episodes],
        }

    def reward(self, *, episode_reward: list[float], trained_tokens: list[int], **_: Any) -> list[float]:
        self._record.batch(episode_reward, sum(trained_tokens))
        return episode_reward

    def _begin(self, seed: int) -> Episode:
        env = self._task.make_env()
        prompt = self._task.renderer.first(self._task.spec.system_prompt, env.reset(seed)[0])
        return Episode(env, prompt, prompt)

    def _act(self, episode: Episode, action: list[int], turn: int) -> None:
        """Step the environment; the episode ends where a rollart trajectory does, at the same limits."""
        spec, renderer = self._task.spec, self._task.renderer
        action = action[: spec.max_tokens - len(episode.prompt) - len(episode.completion)]
        episode.completion += action
        episode.mask += [1] * len(action)
        observation, reward, terminated, truncated, _ = episode.env.step(renderer.decode(action))
        episode.reward += reward
        following = renderer.following(observation, action)
        full = len(episode.prompt) + len(episode.completion) + len(following) >= spec.max_tokens
        episode.done = terminated or truncated or full or turn == spec.max_turns
        if not episode.done:
            episode.new = following
            episode.completion += following
            episode.mask += [0] * len(following)


class Batch:
    """The token matrix and KV cache of the running episodes. Rows are padded inside, where the mask is 0."""

    def __init__(self, trainer: trl.GRPOTrainer) -> None:
        self._model = trainer.accelerator.unwrap_model(trainer.model)
        self._config = copy.deepcopy(trainer.generation_config)
        self._config.return_dict_in_generate = True
        self._stops = torch.tensor(trainer.eos_token_ids)
        self._pad = trainer.processing_class.pad_token_id
        self._ids_BT: Tensor | None = None
        self._mask_BT: Tensor | None = None
        self._cache: Any = None

    def generate(self, new: Sequence[Sequence[int]]) -> list[list[int]]:
        """Append each row's new tokens and generate its next ones, up to and with a stop token."""
        ids_BT, mask_BT = self._append(new)
        output = self._model.generate(
            input_ids=ids_BT, attention_mask=mask_BT, cache=self._cache, generation_config=self._config
        )
        answers_BT = output.sequences[:, ids_BT.shape[1] :]
        stops_BT = torch.isin(answers_BT, self._stops).long()
        kept_BT = stops_BT.cumsum(1) - stops_BT == 0
        self._ids_BT, self._mask_BT = output.sequences, torch.cat([mask_BT, kept_BT.long()], 1)
        self._cache = output.cache
        return [row[kept].tolist() for row, kept in zip(answers_BT, kept_BT, strict=True)]

    def keep(self, rows: list[int]) -> None:
        """Forget all other rows."""
        if len(rows) < len(self._ids_BT):
            self._ids_BT, self._mask_BT = self._ids_BT[rows], self._mask_BT[rows]
            self._cache.batch_select_indices(torch.tensor(rows))

    def _append(self, new: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        width = max(map(len, new))
        ids_BT = torch.tensor([[self._pad] * (width - len(row)) + list(row) for row in new])
        mask_BT = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in new])
        if self._ids_BT is None:
            return ids_BT, mask_BT
        return torch.cat([self._ids_BT, ids_BT], 1), torch.cat([self._mask_BT, mask_BT], 1)


# ------------------------------------------------------------------------------------------------------------ training
def settings(config: Config, spec: TaskSpec, micro_batch: int, folder: str) -> trl.GRPOConfig:
    """TRL's settings that mean what the config means; `dapo` is the mean over the batch's trained tokens, as ours."""
    rollout, train = config.rollout, config.train
    batch = rollout.groups_per_batch * rollout.group_size
    return trl.GRPOConfig(
        output_dir=folder,
        max_steps=config.steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=batch // micro_batch,
        num_generations=rollout.group_size,
        max_completion_length=spec.max_turn_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        learning_rate=train.learning_rate,
        max_grad_norm=train.grad_clip,
        loss_type="dapo",
        epsilon=train.clip_low,
        epsilon_high=train.clip_high,
        beta=train.kl_coef,
        scale_rewards="group",
        shuffle_dataset=False,
        seed=config.seed,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )


def optimizers(config: Config, model: torch.nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW and a learning rate that rises from the first step on; transformers' own schedule gives that step a 0."""
    train = config.train
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=train.learning_rate,
        betas=(train.beta1, train.beta2),
        weight_decay=train.weight_decay,
        fused=True,
    )
    rise = max(1, train.lr_warmup_steps)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / rise))


def train(config: Config, folder: Path, micro_batch: int) -> Record:
    """One run of `config.steps` optimizer steps from the weights in `folder`."""
    record, task = Record(), Task.of(config, folder)
    play = SingleTurn(task, record) if task.spec.max_turns == 1 else MultiTurn(task, record)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left")
    play.check_rendering(tokenizer)
    with tempfile.TemporaryDirectory() as output:
        trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=play.reward,
            args=settings(config, task.spec, micro_batch, output),
            train_dataset=play.dataset,
            processing_class=tokenizer,
            callbacks=[record],
            optimizers=optimizers(config, model),
            rollout_func=play.rollout_func,
        )
        trainer.train()
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path, help="a rollart config with one task")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for `rollart train`")
    parser.add_argument("--model", type=Path, required=True, help="the weights to start from, in Hugging Face format")
    parser.add_argument("--micro-batch", type=int, required=True, help="trajectories per forward and backward pass")
    parser.add_argument("--threads", type=int, required=True, help="torch's threads")
    parser.add_argument("--json", type=Path, required=True, help="where to write what it took")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*experimental feature.*")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(options.threads)
    record = train(load(options.config, options.overrides), options.model, options.micro_batch)
    versions = {module.__name__: module.__version__ for module in (trl, transformers, torch)}
    names = ("rewards", "trajectories", "trained_tokens", "wall_s", "cpu_s")
    options.json.write_text(json.dumps({"versions": versions} | {name: getattr(record, name) for name in names}))


if __name__ == "__main__":
    main()
