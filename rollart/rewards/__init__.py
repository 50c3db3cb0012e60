"""Stateless rewards that a config names: a function, or a class whose constructor arguments are `reward_options`.

    rule         pure functions: the reward of the built-in task `sorting`
    math         is a mathematical answer equal to the expected one?
    code         runs code in a sandbox, against tests
    judge        asks a model behind an OpenAI-compatible endpoint
    composite    a weighted, gated sum of other rewards
    group        rewards that see all trajectories of a group

Invariant: each sees a `RewardRequest` and nothing else of the run. What this package leaves out: where and how often a
reward is called (`rollart.data.serverless`).
"""
