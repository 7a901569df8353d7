"""Secrets spelled out in commands, variables and scripts, and harmless words that look like them."""

from __future__ import annotations

import base64
import shlex

import pytest

from gpuwarden.core.leaks import forms_of, spelled, spelled_in, spelled_in_script
from gpuwarden.core.sanitize import TOKEN
from paths import CORPUS

SCRIPTS = CORPUS / "scripts"
HEX = "0123456789abcdef0123456789abcdef01234567"

DANGEROUS = [
    "python train.py --password hunter2",
    "python train.py --password=hunter2",
    "python train.py --db-password 'correct horse battery'",
    "python train.py --passwd s3cr3t",
    "python train.py --passphrase opensesame",
    f"python train.py --wandb-key {HEX}",
    f"python train.py --wandb_key={HEX}",
    f"python train.py --wandb_api_key {HEX}",
    f"python train.py --wandb-api-key={HEX}",
    "python train.py --token=abc123def",
    "python train.py --token abc123def",
    "python train.py --hf_token mysecretvalue",
    "python train.py --hub_token=mysecretvalue",
    "python train.py --hub-token mysecretvalue",
    "python train.py --auth_token abcdefgh1234",
    "python train.py --access-token=abcdefgh1234",
    "python train.py --api_key abcdefgh1234",
    "python train.py --api-key=abcdefgh1234",
    "python train.py --apikey abcdefgh1234",
    "python train.py --openai_api_key abcdefgh1234",
    "python train.py --secret opensesame",
    "python train.py --client-secret opensesame",
    "python train.py --aws_secret_access_key wJalrXUtnFEMIK7MDENGbPxRfiCY",
    "python train.py --comet_api_key=A1b2C3d4E5f6",
    "python train.py logger.wandb.api_key=A1b2C3d4E5f6",
    "python train.py +trainer.hub_token=A1b2C3d4E5f6",
    "env AUTH='Bearer abcdefghijkl' python train.py",
    "env WANDB_API_KEY=A1b2C3d4E5f6 python train.py",
    "bash -c 'export HF_TOKEN=A1b2C3d4E5f6; python train.py'",
    "bash -c 'python train.py --password hunter2'",
    "curl -H 'Authorization: Bearer abcdefghijkl' https://x.org/d.bin",
    "curl -H 'authorization: token abcdefghijkl' https://x.org/d.bin",
    "curl -H 'Authorization: Basic dXNlcjpwYXNz' https://x.org/d.bin",
    "curl -H 'X-Api-Key: abcdefghijkl' https://x.org/d.bin",
    "curl -H 'PRIVATE-TOKEN: abcdefghijkl' https://gitlab.com/x",
    "curl -u alice:hunter2 https://x.org/d.bin",
    "wget https://alice:hunter2@x.org/d.bin",
    "pip install git+https://oauth2:A1b2C3d4E5f6@gitlab.com/x/y.git",
    "git clone https://A1b2C3d4E5f6A1b2C3d4@github.com/x/y.git",
    "python train.py --db postgresql://bob:hunter2@db/x",
    "python train.py --broker redis://:hunter2@cache:6379/0",
    "python train.py --data 'https://x.org/d.bin?token=A1b2C3d4E5f6G7h8'",
    "python train.py --data 'https://b.blob.net/d?sv=1&sig=A1b2C3d4E5f6G7h8'",
    f"wandb login {HEX}",
    "sshpass -p hunter2 ssh box",
    "sshpass -phunter2 ssh box",
    'python train.py --config \'{"api_key": "A1b2C3d4E5f6"}\'',
    "hf auth login --token mysecretvalue",
    "aws configure set aws_secret_access_key wJalrXUtnFEMIbPxRfi",
    "docker login -u bob -p hunter2",
    "python train.py --bearer abcdefgh123",
    "swanlab login -k a1b2c3d4e5f6a7b8c9d0",
    "python train.py --notify https://hooks.slack.com/services/T0000/B0000/abcd1234",
    "python train.py --encryption_key a1b2c3d4e5f6a7b8c9d0",
    "bash -lc 'MYSQL_PWD=hunter2 python train.py'",
    "jupyter lab --NotebookApp.token=abc123",
    "python train.py --hubToken mysecretvalue",
    "env PGPASSWORD=correcthorse99 python train.py",
    "mysql -u me -pcorrecthorse99 db",
    "bash -c \"echo 'machine x.org login bob password correcthorse99' > ~/.netrc\"",
]
INNOCENT = [
    "python train.py --tokenizer gpt2",
    "python train.py --tokenizer=meta-llama/Llama-3.1-8B-Instruct",
    "python train.py --token_file /run/secrets/hf",
    "python train.py --token-path=~/.cache/huggingface/token",
    "python train.py --max_tokens 100",
    "python train.py --max-new-tokens=100",
    "python train.py --token $HF_TOKEN",
    "python train.py --token=${HF_TOKEN}",
    "python train.py --hub_token $HF_TOKEN",
    "python train.py --hub_token HF_TOKEN",
    "python train.py --use_auth_token True",
    "python train.py --use_auth_token",
    "python train.py --token --push_to_hub",
    "python train.py --pad_token '<|endoftext|>'",
    "python train.py --eos_token=</s>",
    "python train.py --pad_token_id 50256",
    "python train.py --placeholder_token '<cat-toy>' --initializer_token toy",
    "python train.py --instance_token TOK",
    "python train.py --trigger_token skswatercolor",
    "python train.py --tokens_per_batch 4096",
    "python train.py --num_tokens=1e9",
    "python train.py --key_size 256",
    "python train.py --sort_key eval_loss",
    "python train.py --label_key=label",
    "python train.py --image_key image --text_key caption",
    "python train.py --private-key ~/.ssh/id_ed25519",
    "python train.py --password-file /run/secrets/db",
    "python train.py --password $DB_PASSWORD",
    "python train.py --secret_name my-secret",
    "python train.py --credentials ./service.json",
    "python train.py --wandb_key_env WANDB_API_KEY",
    "python train.py --api_key_env OPENAI_API_KEY",
    "python train.py --api-key '<your key>'",
    "python train.py --api_key '***'",
    "bash -c 'python train.py --token $HF_TOKEN'",
    "bash -c 'WANDB_API_KEY=$WANDB_API_KEY python train.py'",
    'curl -H "Authorization: Bearer $HF_TOKEN" https://x.org',
    "curl -H 'Authorization: Bearer ${TOKEN}' https://x.org",
    "wget https://x.org:8080/d@v2/file.bin",
    "git clone git@github.com:x/y.git",
    "git clone ssh://git@github.com/x/y.git",
    "pip install git+https://oauth2:${GL_TOKEN}@gitlab.com/x/y.git",
    "pip install 'torch==2.6.0' @ https://x.org/t.whl",
    "python train.py --data s3://bucket/key=2024/part.parquet",
    "python train.py --resume runs/2024-11-02T10:00:00/checkpoint-500",
    "docker run -u 1000:1000 image python -u train.py",
    "ssh -p 2222 box",
    "python train.py --run_name token-dropout-0.1 --notes 'password of the day: none'",
    "python train.py model.tokenizer=gpt2 data.token_type=word trainer.key_metric=loss",
    "python train.py --auth none",
    "accelerate launch --main_process_port 29500 train.py --hash 0123456789abcdef0123456789abcdef",
    "python train.py --dataset_revision 0123456789abcdef0123456789abcdef01234567",
    "python train.py --attention_key_dim 64 --value_key_ratio 0.5",
    "echo 'bearer of bad news'",
    "python train.py --cache_key 0a1b2c3d4e5f6a7b",
    "python train.py --mask_token '[MASK]' --prefix_token translate --stop_token END",
    "deepspeed --hostfile=hosts --include='a@b:0' train.py",
    "python train.py --author bob --email bob@x.org",
    "python train.py --bypass yes --password_policy strict",
    "python train.py --vocab bpe://a:b --data https://user@host.org/x.tar",
    "sshpass -e ssh -p 22 box",
    "mysql -u me -p db",
    "bash -c 'echo machine learning login password'",
    "python train.py --machine gpu --login bob --nopassword true",
    "python train.py --csrf-protect --secretary bob --passthrough yes --compass north",
]


def dangerous(command: str) -> bool:
    words = shlex.split(command)
    return bool(list(spelled(words))) or any(TOKEN.search(w) for w in words)


@pytest.mark.parametrize("command", DANGEROUS)
def test_literal_secret_in_a_command_is_found(command: str) -> None:
    assert dangerous(command)


@pytest.mark.parametrize("command", INNOCENT)
def test_harmless_command_is_not_flagged(command: str) -> None:
    assert not list(spelled(shlex.split(command)))


@pytest.mark.parametrize(
    ("value", "leaks"),
    [
        ("Bearer abcdefghijkl0123456", True),
        ("https://alice:hunter2@x.org", True),
        ("bearer token", False),
        ("https://x.org/a:b@c", False),
        ("--token abc", False),
    ],
)
def test_variable_values_are_checked_for_secrets(value: str, leaks: bool) -> None:
    assert bool(list(spelled_in(value))) is leaks


@pytest.mark.attack("secrets", "encodes a key of this process in an argument")
@pytest.mark.parametrize("around", ["", "a", "ab", "me:", "abcd"])
def test_encoded_secret_is_found_at_any_offset(around: str) -> None:
    key = "s3cr3t-of-an-account"
    for text in (base64.b64encode((around + key + around).encode()).decode(), (around + key).encode().hex()):
        assert any(form in text for form in forms_of(key))
    assert not any(form in base64.b64encode(b"another-secret-than-this").decode() for form in forms_of(key))


def test_scripts_that_name_secrets_and_hold_none_pass() -> None:
    for script in sorted(SCRIPTS.glob("*.py")):
        assert not list(spelled_in_script(script.read_text("utf-8"))), script.name


@pytest.mark.parametrize(
    ("line", "leaks"),
    [
        (f'wandb.login(api_key="{HEX}")', True),
        (f'os.environ["WANDB_API_KEY"] = "{HEX}"', True),
        ('headers = {"Authorization": "Bearer abcdefghijkl0123456"}', True),
        ('url = "https://alice:hunter2@x.org/d.bin"', True),
        ('headers = {"Authorization": f"Bearer {token}"}', False),
        ('headers = {"X-API-Key": "abcdefgh"}', True),
        ('curl -H "X-API-Key: abcdefgh" https://x.org', True),
        ('headers = {"X-API-Key": key} if key else {}', False),
        ('headers = {"Authorization": token or fallback}', False),
        ('token = os.environ["HF_TOKEN"]', False),
        ('tokenizer.pad_token = "<|endoftext|>"', False),
        ('api_key = "your-key-here"', False),
        ("password = getpass.getpass()", False),
    ],
)
def test_only_literal_secrets_in_a_script_are_flagged(line: str, leaks: bool) -> None:
    assert bool(list(spelled_in_script(line))) is leaks


@pytest.mark.slow
@pytest.mark.parametrize(
    "piece", ["api_key", "https://", "Bearer ", "a.b-c_", "--token ", "x=", "://:", "?key=", "a", "{", "{=", "x=$"]
)
def test_secret_after_a_megabyte_of_lookalikes_is_found(piece: str) -> None:
    """A search with backtracking would take hours here."""
    text = piece * ((1 << 20) // len(piece))
    leak = '\napi_key = "Zx81kQ0vLm2pRt7w"\n'
    assert list(spelled_in(text + leak)) and list(spelled_in_script(text + leak))
    assert list(spelled([text, "--api-key", "Zx81kQ0vLm2pRt7w"]))
