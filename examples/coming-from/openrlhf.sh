#!/usr/bin/env bash
# PPO by OpenRLHF: a critic, the KL in the reward.
set -x

ray job submit --address="http://127.0.0.1:8265" \
    --runtime-env-json='{"working_dir": "."}' \
    -- python3 -m openrlhf.cli.train_ppo_ray \
    --actor.model_name_or_path models/my-model \
    --reward.remote_url order.py \
    --data.prompt_dataset prompts.jsonl \
    --data.input_key prompt \
    --data.label_key answer \
    --data.max_len 24 \
    --ckpt.output_dir out/openrlhf \
    --ckpt.save_steps -1 \
    --algo.advantage.estimator gae \
    --algo.advantage.gamma 1.0 \
    --algo.advantage.lambd 0.95 \
    --algo.kl.init_coef 1e-2 \
    --rollout.batch_size 32 \
    --rollout.n_samples_per_prompt 1 \
    --rollout.temperature 1.0 \
    --train.batch_size 16 \
    --train.micro_batch_size 16 \
    --train.max_epochs 1 \
    --train.num_episodes 1 \
    --actor.adam.lr 5e-5 \
    --actor.adam.betas 0.9 0.95 \
    --actor.lr_scheduler constant \
    --actor.eps_clip 0.2 \
    --critic.adam.lr 1e-4 \
    --critic.freezing_steps 1 \
    --reward.clip_range -5 5 \
    --actor.num_nodes 1 \
    --actor.num_gpus_per_node 1 \
    --vllm.num_engines 0 \
    --ds.zero_stage 2 \
    --ds.packing_samples \
    --actor.gradient_checkpointing_enable \
    --logger.logging_steps 1
