# shellcheck shell=sh
# Point downloads at mirrors that work from mainland China. Source it, before Python starts:
#
#   DATA_DIR=/root/autodl-tmp . ./setup_mirrors.sh
#
# Each variable that is already set stays as it is, also when it is set to nothing.
# DATA_DIR is where caches go; without it they stay where they are. For pip, set PIP_INDEX_URL to a package mirror near
# you (TUNA, Aliyun and USTC run some).

export HF_ENDPOINT="${HF_ENDPOINT-https://hf-mirror.com}"
export HF_HUB_DISABLE_XET="${HF_HUB_DISABLE_XET-1}" # the hosts of large files are not mirrored
export PIP_DEFAULT_TIMEOUT="${PIP_DEFAULT_TIMEOUT-60}"

if [ -n "${DATA_DIR:-}" ]; then
    export HF_HOME="${HF_HOME-$DATA_DIR/cache/huggingface}"
    export MODELSCOPE_CACHE="${MODELSCOPE_CACHE-$DATA_DIR/cache/modelscope}"
    export PIP_CACHE_DIR="${PIP_CACHE_DIR-$DATA_DIR/cache/pip}"
    mkdir -p "$HF_HOME" "$MODELSCOPE_CACHE" "$PIP_CACHE_DIR"
fi

# A proxy is for foreign hosts only. Leading dots and no stars: that is what requests, httpx and curl all understand.
if [ -n "${https_proxy:-}${HTTPS_PROXY:-}${http_proxy:-}${HTTP_PROXY:-}" ]; then
    no_proxy="${no_proxy:+$no_proxy,}127.0.0.1,localhost,hf-mirror.com,.edu.cn,.aliyun.com,.aliyuncs.com,.ustc.edu.cn,.modelscope.cn,.tencentyun.com"
    NO_PROXY=$no_proxy
    export no_proxy NO_PROXY
fi
