#!/usr/bin/env bash
# tanager on several machines by plain ssh:
#
#     launch/ssh.sh "one two three" imagenet-nf-resnet-50-tan \
#         --data /shared/imagenet --out /shared/runs/imagenet
#
# The first machine coordinates: the others must reach its ports $PORT and the next one.
# All must see this folder, tanager and the folder of --out at the same paths. Ctrl-C
# stops all of them with a checkpoint; the same command goes on.
#
# PORT (9876), TANAGER (tanager) and SSH (ssh) can be set.

set -uo pipefail

read -r -a machines <<<"${1:?"say the machines, as in \"one two\", then the recipe"}"
shift
port=${PORT:-9876}
coordinator="${machines[0]}:$port"
words=$(printf ' %q' "$@")

children=()
for number in "${!machines[@]}"; do
    # With a terminal (-tt), the end of ssh is a signal to what it runs.
    ${SSH:-ssh -tt} "${machines[$number]}" \
        "cd $(printf %q "$PWD") && exec ${TANAGER:-tanager} train$words --distributed \
        --coordinator $coordinator --hosts ${#machines[@]} --host $number" &
    children+=("$!")
done
trap 'kill -TERM "${children[@]}" 2>/dev/null' INT TERM

status=0
for child in "${children[@]}"; do
    wait "$child"
    code=$?
    # A wait that a signal cut short is taken up again.
    while kill -0 "$child" 2>/dev/null; do
        wait "$child"
        code=$?
    done
    [ "$code" -gt "$status" ] && status=$code
done
exit "$status"
