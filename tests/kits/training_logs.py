"""Lines that trainers print, in the formats of public logs, with the values that a reader should find in them.

The lines were written for the tests; `where` names the thread or source of each format. `step` and `total` count from
the run's first step as far as the lines allow; `nan` is true if the user should be alerted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Printed:
    """Some output, and the values that should be read from it."""

    where: str
    text: str
    step: int | None = None
    total: int | None = None
    loss: float | None = None
    lr: float | None = None
    nan: bool = False


BAR = "████      "
SEEN: tuple[Printed, ...] = (
    Printed(
        "transformers 5.23 Trainer",
        "  2%|▏         | 10/500 [00:04<03:20,  2.45it/s]\r"
        "                                                \r"
        "{'loss': '5.677', 'grad_norm': '2.038', 'learning_rate': '0.0002', 'epoch': '0.09'}\n",
        10, 500, 5.677, 0.0002,
    ),
    Printed(
        "SY-Xuan/Pink#6",
        " 14%|█▍        | 71/497 [02:01<12:10,  1.71s/it]\r"
        "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 0.00051, 'epoch': 0.14}                    \n"
        "{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 0.00052, 'epoch': 0.14}                    \n",
        71, 497, 0.0, 0.00052, nan=True,
    ),
    Printed("transformers 4 Trainer", "{'loss': nan, 'learning_rate': 1.9e-05, 'epoch': 1.5}\n", lr=1.9e-05, nan=True),
    Printed(
        "trl DPOTrainer",
        "{'loss': '0.6712', 'grad_norm': '4.1', 'learning_rate': '5e-07', 'rewards/chosen': '0.012', "
        "'rewards/margins': '0.031', 'logps/chosen': '-102.4', 'epoch': '0.31'}\n",
        loss=0.6712, lr=5e-07,
    ),
    Printed(
        "transformers Trainer with an evaluation",
        " 50%|█████     | 100/200 [01:00<01:00,  1.66it/s]\r"
        "{'loss': '0.81', 'learning_rate': '1e-05', 'epoch': '1'}\n"
        "  0%|          | 0/25 [00:00<?, ?it/s]\r 80%|████████  | 20/25 [00:02<00:00,  8.1it/s]\r"
        "{'eval_loss': '0.97', 'eval_runtime': '2.5', 'eval_accuracy': '0.71', 'epoch': '1'}\n",
        100, 200, 0.81, 1e-05,
    ),
    Printed(
        "transformers Trainer at its end",
        "100%|██████████| 40/40 [00:20<00:00,  2.0it/s]\r{'loss': '1.25', 'learning_rate': '0', 'epoch': '2'}\n"
        "{'train_runtime': '20.4', 'train_samples_per_second': '15.7', 'train_loss': '2.75', 'epoch': '2'}\n",
        40, 40, 1.25, 0.0,
    ),
    Printed(
        "Lightning-AI/pytorch-lightning#4225",
        "Epoch 0:   0%|          | 0/18 [00:00<?, ?it/s]\r"
        "Epoch 0:  22%|██▏       | 4/18 [00:17<01:02,  4.47s/it, loss=9.947, v_num=19]\r",
        4, None, 9.947,
    ),
    Printed(
        "Lightning-AI/pytorch-lightning#3866",
        "Epoch 0:  10% 170/1702 [01:01<13:00,  2.11it/s, loss=0.9, v_num=0]\n"
        "Epoch 2:  97% 1652/1702 [13:01<00:23,  2.11it/s, loss=0.158, v_num=0, train_loss=0.149]\n",
        2 * 1702 + 1652, None, 0.158,
    ),
    Printed(
        "intelligent-machine-learning/dlrover#564",
        "Sanity Checking DataLoader 0: 100%|██████████| 2/2 [00:00<00:00,  2.74it/s]\n"
        "Training: 0it [00:00, ?it/s]\nEpoch 0:   0%|          | 2/62733 [00:00<1:27:16, 11.98it/s, v_num=31]\r",
        2, None, None,
    ),
    Printed(
        "ecmwf/anemoi-core#614",
        "Epoch 0:   2%|▏         | 3744/150000 [3:12:36<125:24:04,  0.32it/s, v_num=35a4, ...]\r",
        3744, None, None,
    ),
    Printed(
        "divamgupta/image-segmentation-keras#50",
        "Epoch 1/4\n512/512 [==============================] - 127s 247ms/step - loss: nan - acc: nan\n",
        512, 2048, None, nan=True,
    ),
    Printed(
        "AmadeusITGroup/Moire-Pattern-Detection#25",
        "Epoch 2/10\n  1/102 [..............................] - ETA: 19:24 - loss: 0.6917 - accuracy: 0.5938"
        "\b\b\b\b\b\b\r 13/102 [==>...........................] - ETA: 7:25 - loss: 0.6245 - accuracy: 0.6635",
        115, 1020, 0.6245,
    ),
    Printed(
        "keras 3",
        "Epoch 3/5\n\x1b[1m 1/63\x1b[0m \x1b[37m━━━━━━━━━━━━━━━━━━━━\x1b[0m \x1b[1m9s\x1b[0m 150ms/step - loss: 0.51"
        "\r\x1b[1m63/63\x1b[0m \x1b[32m━━━━━━━━━━━━━━━━━━━━\x1b[0m\x1b[37m\x1b[0m \x1b[1m1s\x1b[0m 9ms/step"
        " - accuracy: 0.81 - loss: 0.4821 - val_accuracy: 0.79 - val_loss: 0.53 - learning_rate: 0.0010\n",
        189, 315, 0.4821, 0.001,
    ),
    Printed(
        "karpathy/nanoGPT#215",
        "2026-03-22 09:32:32 step 3000: train loss 4.0390, val loss 4.0427\nsaving checkpoint to out\n"
        "2026-03-22 09:32:52 iter 3010: loss nan, time 1019.95ms, mfu 14.12%\n",
        3010, None, None, nan=True,
    ),
    Printed("karpathy/nanoGPT#110", "iter 1641: loss 3.9748, time 567.31ms, mfu -100.00%\n", 1641, None, 3.9748),
    Printed(
        "datawhalechina/tiny-universe#31",
        "99999 | loss 2.31 | lr 3.2e-05 | 2001.10ms | mfu 1.68%\n"
        "step 100000: train loss nan, val loss nan\n100000 | loss nan | lr 1.5e-06 | 2006.12ms | mfu 1.68%\n",
        100000, None, None, 1.5e-06, nan=True,
    ),
    Printed(
        "open-mmlab/mmdetection#2739",
        "2026-05-15 14:44:57,690 - mmdet - INFO - Epoch [1][350/2500]\tlr: 0.00175, eta: 1 day, 15:01:59, "
        "time: 1.873, data_time: 1.107, memory: 6226, loss_rpn_cls: 0.2049, acc: 86.3379, loss: 1.7653\n",
        350, None, 1.7653, 0.00175,
    ),
    Printed(
        "open-mmlab/mmdetection#11893",
        "08/03 22:09:24 - mmengine - INFO - Epoch(train)  [2][ 500/2931]  lr: 2.0000e-02  eta: 0:39:15  time: 0.0578  "
        "data_time: 0.0017  memory: 2389  loss: nan  loss_rpn_cls: nan  loss_cls: nan  acc: 0.0000  loss_bbox: nan\n",
        3431, None, None, 0.02, nan=True,
    ),
    Printed(
        "liyih/RCTrans#6",
        "2026-04-18 21:58:31,047 - mmdet - INFO - Iter [10100/316440]\tlr: 3.990e-04, eta: 7 days, 4:23:57, "
        "time: 2.125, memory: 15378, frame_0_loss_cls: 0.0000, frame_0_enc_loss_cls: 1.25, loss: 3.75, grad_norm: 7.5\n",
        10100, 316440, 3.75, 0.000399,
    ),
    Printed(
        "open-mmlab validation",
        "06/01 10:00:00 - mmengine - INFO - Epoch(train)  [3][100/100]  lr: 1.0e-03  loss: 0.5\n"
        "06/01 10:00:09 - mmengine - INFO - Epoch(val)  [3][ 50/500]    eta: 0:00:09  time: 0.04  memory: 300\n",
        300, None, 0.5, 0.001,
    ),
    Printed(
        "facebookresearch/fairseq#301",
        "| epoch 010  2000 / 8223 loss=1.27 (1.50), wps=962, wpb=908, bsz=32, lr=0.001, clip=100%, gnorm=2.1427\n"
        "| epoch 010 | valid on 'valid' subset  1000 / 1311 loss=1.60\n",
        9 * 8223 + 2000, None, 1.27, 0.001,
    ),
    Printed(
        "facebookresearch/fairseq#940",
        "| epoch 001:    450 / 1891 loss=11.521, nll_loss=10.881, ppl=1886.05, wps=52922, num_updates=445, "
        "lr=8.90889e-05, gnorm=1.543, clip=0%, oom=0, loss_scale=2.000, wall=882, train_wall=756\n",
        445, None, 11.521, 8.90889e-05,
    ),
    Printed(
        "facebookresearch/fairseq#233",
        '{"epoch": 25, "loss": "3.097", "nll_loss": "1.328", "ppl": "2.51", "wps": 1667443, "num_updates": 53749, '
        '"lr": 0.000190, "gnorm": "0.194", "clip": "100%", "loss_scale": "4.000", "wall": 20721}\n',
        53749, None, 3.097, 0.00019,
    ),
    Printed(
        "epfLLM/Megatron-LLM#11",
        " iteration      182/  250000 | consumed samples:       186368 | elapsed time per iteration (ms): 126995.3 | "
        "learning rate: 1.365E-05 | global batch size:  1024 | lm loss: 2.382640E+00 | loss scale: 1.0 | "
        "grad norm: 0.227 | number of skipped iterations:   0 | number of nan iterations:   0 |\n",
        182, 250000, 2.38264, 1.365e-05,
    ),
    Printed(
        "bigscience-workshop/Megatron-DeepSpeed#396",
        "".join(
            f" iteration     {n}/  250000 | consumed samples:        43408 | elapsed time per iteration (ms): 4247.9 | "
            "learning rate: 2.999E-04 | global batch size:     8 | loss scale: 1.0 | grad norm: nan | "
            "number of nan iterations:   0 | samples per second: 1.886 |\n"
            for n in range(5426, 5432)
        ),
        5431, 250000, None, 2.999e-04, nan=True,
    ),
    Printed("cchen156/Learning-to-See-in-the-Dark#117", "333 154 Loss=nan Time=0.040\n", nan=True),
    Printed(
        "nv-tlabs/LION#9",
        "2026-01-25 01:03:05.674 | INFO     | trainers.base_trainer:train_epochs:256 - [R0] | E104 iter[ 14/ 15] | "
        "[Loss] 12.5 | [exp] ./exp/0125/car/B40 | [step]  1574 | [url] none | [time] 0.4m (~4h) |[best] 0 -100.0x1e-2\n",
        1574, None, 12.5,
    ),
    Printed(
        "KimMeen/Time-LLM#14",
        "599it [06:49,  1.45it/s]\r\titers: 600, epoch: 1 | loss: 0.3127654\n\tspeed: 0.6871s/iter; left time: 9247.2s\n",
        600, None, 0.3127654,
    ),
    Printed(
        "huggingface/nanoVLM#187",
        "Step: 250, Loss: 2.1875, Val Loss: 2.4375, Tokens/s: 8123.55\n"
        "Epoch 0 | Train Loss: 2.3125 | Val Loss: 2.4000 | Time: 61.25s | T/s: 8123.55\n",
        250, None, 2.3125,
    ),
    Printed("xiaotudui/pytorch-tutorial#1", "训练次数：700, Loss：1.6171432733535767\n整体测试集上的Loss: 262.62\n",
            700, None, 1.6171432733535767),
    Printed(
        "automl/ProbTransformer#2",
        "2026-11-19_07:48:23.57 train_mean_batch_size: 11.2  step:2\n2026-11-19_07:48:23.57 train_loss: 0.47968  step:2\n"
        "2026-11-19_07:48:30.40 valid_loss: 4.58889  step:2\n",
        2, None, 0.47968,
    ),
    Printed(
        "replicate/dreambooth#31",
        "Steps:   1%|          | 1/100 [00:09<16:00,  9.70s/it, loss=nan, lr=1e-6]\r"
        "Steps:   2%|▏         | 2/100 [00:09<06:47,  4.16s/it, loss=nan, lr=1e-6]\r",
        2, 100, None, 1e-06, nan=True,
    ),
    Printed("gautham20/pytorch-ts#4", "Training loss at epoch 25 - nan\n", nan=True),
    Printed(
        "calmiLovesAI/Basic_CNNs_TensorFlow2#22",
        "Epoch: 0/2, step: 12/40, train loss: 1.75, train accuracy: 0.10688\n"
        "Epoch: 0/2, train loss: 1.50, train accuracy: 0.10688, valid loss: nan, valid accuracy: 0.10680\n",
        12, 80, 1.5,
    ),
    Printed(
        "manishsoni1908/Mobilenet-ssd-keras#21",
        "Epoch 1/10\n  3/234 [..............................] - ETA: 33:37:24 - loss: 44.4110\n"
        "  4/234 [..............................] - ETA: 25:09:00 - loss: inf \n",
        4, 2340, None, nan=True,
    ),
    Printed(
        "timm train.py",
        "Train: 0 [   0/1251 (  0%)]  Loss: 6.9 (6.9)  Time: 1.5s, 9.1/s  (1.5s, 9.1/s)  LR: 1.0e-06  Data: 1.0 (1.0)\n"
        "Train: 1 [ 150/1251 ( 12%)]  Loss: 5.906 (6.103)  Time: 0.512s, 2000.10/s  (0.520s, 1969.33/s)  "
        "LR: 4.000e-04  Data: 0.010 (0.012)\nTest: [  48/48]  Time: 0.1 (0.2)  Loss:   4.41 (  4.80)  "
        "Acc@1:  12.1 ( 11.2)\n",
        1401, None, 5.906, 4e-04,
    ),
    Printed(
        "ultralytics 8",
        "      Epoch    GPU_mem   box_loss   cls_loss   dfl_loss  Instances       Size\n"
        "      2/100      2.51G       1.25        3.5       1.25         32        640:  50%|█████     | 4/8 "
        "[00:03<00:03,  1.2it/s]\r"
        "                 Class     Images  Instances      Box(P          R      mAP50  mAP50-95): 100%|██████████| 2/2 "
        "[00:01<00:00,  1.5it/s]\n                   all          4         17      0.574       nan      0.6      0.4\n",
        12, 800, 6.0,
    ),
    Printed(
        "deepspeed engine",
        "[2026-02-03 10:11:12,131] [INFO] [logging.py:96:log_dist] [Rank 0] step=30, skipped=2, lr=[9.65e-06], "
        "mom=[[0.9, 0.95]]\nsteps: 30 loss: 2.3125 iter time (s): 0.52 samples/sec: 15.25\n",
        30, None, 2.3125, 9.65e-06,
    ),
    Printed(
        "deepspeed loss scaler",
        "[2026-02-03 10:11:10,131] [INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step."
        " Attempted loss scale: 65536, reducing to 32768\n",
    ),
    Printed(
        "accelerate examples",
        "  Num examples = 3668\n  Total optimization steps = 1,377\n"
        "  7%|▋         | 100/1377 [00:33<07:01,  3.03it/s]\repoch 0: {'accuracy': 0.68, 'f1': 0.81}\n",
        100, 1377,
    ),
    Printed(
        "pytorch/examples mnist",
        "Train Epoch: 2 [640/60000 (1%)]\tLoss: 0.293182\n\nTest set: Average loss: 0.0514, Accuracy: 9830/10000 (98%)\n",
        60640, None, 0.293182,
    ),
    Printed(
        "pytorch/examples imagenet",
        "Epoch: [0][  10/5005]\tTime  0.505 ( 0.601)\tData  0.01 ( 0.09)\tLoss 6.9e+00 (7.0e+00)\tAcc@1   0.39 (  0.2)\n",
        10, None, 6.9,
    ),
    Printed(
        "a loader in tqdm, epoch after epoch",
        " 60%|██████    | 30/50 [00:03<00:02,  9.1it/s]\r100%|██████████| 50/50 [00:05<00:00,  9.1it/s]\n"
        " 20%|██        | 10/50 [00:01<00:04,  9.1it/s]\r",
        60,
    ),
    Printed(
        "healthy words",
        "INFO: nan_to_num is on, information: inference with inf cutoff\nWARNING: NaN checks are disabled\n"
        "Banana loss function: focal\nif loss is nan the run stops\nsetting loss_weight=0.5 lr_scale=inf\n"
        "Namespace(lr=0.1, loss='nan', step=100, epochs=3, train_loss=nan)\n",
    ),
    Printed(
        "preparing data",
        "Map: 100%|██████████| 1000/1000 [00:01<00:00, 801.2 examples/s]\n"
        "model.safetensors:  45%|████▌     | 450M/1.00G [00:04<00:05, 99.1MB/s]\r"
        "Fetching 12 files:  50%|█████     | 6/12 [00:01<00:01,  4.1it/s]\rLoading weights: 100%|██████████| 290/290\n",
    ),
    Printed(
        "DETR and MAE engines",
        "Epoch: [0]  [   0/1251]  eta: 2:11:02  lr: 0.000000  loss: 6.9 (6.9)  time: 5.5  data: 4.0  max mem: 9104\n"
        "Epoch: [1]  [  20/1251]  eta: 0:11:02  lr: 0.000003  loss: 6.9077 (6.9150)  time: 0.5377  data: 0.0004  "
        "max mem: 9104\nLoss is nan, stopping training\n",
        1271, None, None, 0.000003, nan=True,
    ),
)  # fmt: skip

UNSEEN: tuple[Printed, ...] = (
    Printed(
        "kohya-ss/sd-scripts#2137",
        "epoch 1/80\nsteps:   1%|▋         | 41/3280 [00:50<1:06:54,  1.24s/it, avr_loss=nan]\nepoch 2/80\n"
        "2026-06-29 11:57:32 INFO     epoch is incremented. current_epoch: 1, epoch: 2        train_util.py:779\n"
        "steps:   2%|█▍        | 82/3280 [01:40<1:05:00,  1.22s/it, avr_loss=nan]\r",
        82, 3280, nan=True,
    ),
    Printed(
        "facebookresearch/d2go#524",
        "[04/05 01:30:31 d2.utils.events]:  eta: 0:03:14  iter: 39  total_loss: 1.375  loss_cls: 0.6354  "
        "loss_box_reg: 0.637  time: 0.3633  data_time: 0.0641  lr: 7.5527e-06  max_mem: 433M\n",
        39, None, 1.375, 7.5527e-06,
    ),
    Printed(
        "pytorch/torchtitan#2389",
        "[rank0]:[titan] 2026-02-24 19:46:17,508 - root - INFO - step:  4  loss:  7.62585  grad_norm: 26.6250  "
        "memory: 66.91GiB(37.51%)  tps: 10,050  tflops: 314.71  mfu: 13.99%\n",
        4, None, 7.62585,
    ),
    Printed(
        "Lightning-AI/litgpt#1224", "Epoch 1 | iter 46 step 12 | loss train: 3.724, val: n/a | iter time: 45.73 ms\n",
        12, None, 3.724,
    ),
    Printed("Lightning-AI/litgpt#689", "iter 77 step 39: loss 10.8259, iter time: 214.40ms (optimizer.step)\n", 39, None, 10.8259),
    Printed(
        "EleutherAI/gpt-neox#947",
        " samples/sec: 2.721 | iteration        2/   55000 | elapsed time per iteration (ms): 11761.2 | "
        "learning rate: 2.424E-09 | approx flops per GPU: 9.1TFLOPS | lm_loss: 1.105449E+01 | "
        "number of skipped iterations:   0 | number of nan iterations:   0 |\n",
        2, 55000, 11.05449, 2.424e-09,
    ),
    Printed("tinygrad/tinygrad#13803", "    3 7.34 s run, 11.8750 loss, 0.000000000002 LR, 1454.57 GB used, 236258.78 GFLOPS\n",
            3, None, 11.875, 2e-12),
    Printed(
        "Alpha-VLLM/LLaMA2-Accessory#48",
        "[03:23:49.951215] Epoch: [0]  [1480/1504]  lr: 0.000026  closs: 1.0800 (1.1317)  grad_norm: 0.4995 (1.1826)  "
        "time: 4.5833  data: 0.0002  max mem: 51710\n",
        1480, None, 1.08, 0.000026,
    ),
    Printed(
        "hill-a/stable-baselines#1204",
        "| rollout/                |             |\n|    ep_rew_mean          | nan         |\n"
        "| time/                   |             |\n|    iterations           | 7           |\n"
        "|    total_timesteps      | 3584        |\n| train/                  |             |\n"
        "|    learning_rate        | 0.0002      |\n|    loss                 | 20.1        |\n"
        "|    value_loss           | 36.8        |\n-----------------------------------------\n",
        3584, None, 20.1, 0.0002,
    ),
    Printed("lightgbm-org/LightGBM#742", "[2]\ttraining's binary_logloss: 0.732192\tvalid_1's binary_logloss: 0.731889\n", 2, None, 0.732192),
    Printed(
        "lightgbm-org/LightGBM#886",
        "[LightGBM] [Info] Iteration:2, training auc : 0.642554\n[LightGBM] [Info] Iteration:2, training binary_logloss : 0.499464\n"
        "[LightGBM] [Info] Iteration:2, valid_1 binary_logloss : 0.52\n",
        2, None, 0.499464,
    ),
    Printed("speechbrain/speechbrain#149", "  3%|█▋                 | 16/462 [00:08<03:44,  1.99it/s, loss=4.93]\r", 16, 462, 4.93),
    Printed(
        "ultralytics/yolov5#4963",
        "     Epoch   gpu_mem       box       obj       cls    labels  img_size\n"
        "      0/99     2.64G      0.25      0.05      0.5         4       416: 100%|██████████| 7/7 [00:15<00:00,  2.27s/it]\n"
        "               Class     Images     Labels          P          R     mAP@.5 mAP@.5:.95: 100%|██████████| 1/1 [00:01<00:00,  1.30s/it]\n"
        "                 all               14          0             0          0            0              0\n"
        "     Epoch   gpu_mem       box       obj       cls    labels  img_size\n"
        "      1/99     2.64G       nan       nan       nan         4       416: 100%|██████████| 7/7 [00:15<00:00,  2.27s/it]\n",
        14, 700, nan=True,
    ),
    Printed(
        "verl-project/verl#7412",
        "(TaskRunner pid=222265) step:34 - global_seqlen/min:419336 - global_seqlen/max:497506 - actor/entropy:0.2226 - "
        "actor/pg_loss:0.0423 - actor/kl_loss:0.0013 - actor/loss:0.0425 - actor/grad_norm:0.1296 - actor/lr:2e-06 - "
        "training/global_step:34 - training/epoch:0 - critic/score/mean:-0.018\n",
        34, None, 0.0425, 2e-06,
    ),
    Printed(
        "verl-project/verl#2566", "Training Progress:   0%|          | 2/624 [21:47<114:32:27, 662.94s/it]\n(TaskRunner pid=4035927) \n",
        2, 624,
    ),
    Printed(
        "KellerJordan/modded-nanogpt#65",
        "step:0/1480 val_loss:7.7109 train_time:0ms step_avg:nanms\nstep:125/1480 val_loss:4.3719 train_time:29736ms step_avg:258.57ms\n",
        125, 1480,
    ),
    Printed("tensorflow/models#2912", "INFO:tensorflow:Recording summary at step 59.\nINFO:tensorflow:global step 60: loss = 7.3837 (2.239 sec/step)\n",
            60, None, 7.3837),
    Printed(
        "armaanpriyadarshan/Training-a-Custom-TensorFlow-2.X-Object-Detector#6",
        "I0912 11:40:27.956218 139735407601536 model_lib_v2.py:652] Step 100 per-step time 0.813s loss=1.396\n",
        100, None, 1.396,
    ),
    Printed(
        "fastai/fastai#2512",
        "epoch     train_loss  valid_loss  error_rate  time    \n0         0.913750    0.541250    0.181250    00:15     \n",
        loss=0.91375,
    ),
    Printed(
        "PaddlePaddle/PaddleOCR#16562",
        "[2026/09/24 12:13:19] ppocr INFO: epoch: [3/500], global_step: 500, lr: 0.005000, loss: 0.609742, loss_shrink_maps: 0.29, "
        "loss_cbn: 0.000000, avg_reader_cost: 1.81036 s, avg_batch_cost: 2.03538 s, avg_samples: 16.0, ips: 7.86095 samples/s, "
        "eta: 2 days, 20:01:28, max_mem_reserved: 11326 MB\neval model:: 100%|██████████| 205/205 [00:04<00:00, 44.29it/s]\n",
        500, None, 0.609742, 0.005,
    ),
    Printed(
        "RVC-Project/Retrieval-based-Voice-Conversion-WebUI#702",
        "INFO:Voice:Train Epoch: 9 [20%]\nINFO:Voice:[4200, 9.99e-05]\n"
        "INFO:Voice:loss_disc=3.959, loss_gen=3.062, loss_fm=7.881,loss_mel=17.356, loss_kl=1.535\n",
        4200, None, 3.959, 9.99e-05,
    ),
    Printed(
        "k2-fsa/icefall#314",
        "2026-04-29 10:31:34,352 INFO [train.py:756] Epoch 0, batch 5, loss[loss=0.5348, simple_loss=1.07, pruned_loss=8.8, "
        "over 2432.00 frames.], tot_loss[loss=0.5276, simple_loss=1.06, over 14684.0 frames.], batch size: 32, lr: 3.00e-03\n",
        5, None, 0.5348, 0.003,
    ),
    Printed(
        "graphdeco-inria/gaussian-splatting#17",
        "Reading camera 1130/1130 [11/07 13:56:39]\nLoading Training Cameras [11/07 13:56:39]\n"
        "Training progress:  23%|██▎       | 7000/30000 [01:45<04:24, 86.86it/s, Loss=0.2195082]\r\n"
        "[ITER 7000] Evaluating train: L1 0.2186211347579956 PSNR 12.067031860351562 [11/07 13:58:39]\n",
        7000, 30000, 0.2195082,
    ),
    Printed(
        "maturk/dn-splatter#110",
        "Step (% Done)       Train Iter (time)    ETA (time)           Train Rays / Sec                        writer.py:604\n"
        "-----------------------------------------------------------------------------------                 writer.py:554\n"
        "4090 (81.78%)       43.140 ms            39 s, 300.687 ms     14.86 M                               writer.py:566\n",
        4090,
    ),
    Printed(
        "TimZaman/dotaclient#34",
        "2026-02-03 08:03:24,767 INFO     iteration 9/10000\n2026-02-03 08:03:32,274 INFO      epoch 4/4\n"
        "2026-02-03 08:03:36,499 INFO     steps_per_s=443.39, avg_weight_age=4.9, reward_per_sec=-0.0046, loss=0.2225, entropy=7.487\n",
        9, 10000, 0.2225,
    ),
    Printed("primepake/wav2lip_288x288#33", "Loss: 0.5212869264862754: : 11it [00:06,  1.59it/s]\r", 11, None, 0.5212869264862754),
    Printed(
        "facebookresearch/Detectron#247",
        'json_stats: {"accuracy_cls": 0.923639, "eta": "1 day, 13:30:44", "iter": 120000, "loss": 0.5625, "loss_bbox": 0.107754, '
        '"loss_cls": 0.243266, "lr": 0.010000, "mb_qsize": 64, "mem": 6407, "time": 0.562685}\n',
        120000, None, 0.5625, 0.01,
    ),
    Printed(
        "ericyangyu/PPO-for-Beginners#1",
        "-------------------- Iteration #50 --------------------\nAverage Episodic Length: 1.0\nAverage Episodic Return: nan\n"
        "Average Loss: nan\nTimesteps So Far: 50\n",
        50, nan=True,
    ),
)  # fmt: skip
