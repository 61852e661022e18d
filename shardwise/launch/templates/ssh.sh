#!/bin/bash
# Written by: {{ command }}
# Starts one agent on each host and waits for them. Ctrl-C and SIGTERM save and stop the run; the same script continues
# it. An agent whose connection was lost is started again. The secret of the run goes over the standard input; when
# that ends, the agent is asked to stop.
hosts=({{ hosts }})
train=({{ train }})
secret=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
remote='cd "$1" && shift && read -r SHARDWISE_SECRET && export SHARDWISE_SECRET || exit 2
exec 3<&0
"$@" < /dev/null & agent=$!
{ cat <&3 > /dev/null; kill -TERM $agent; } & guard=$!
wait $agent; code=$?
kill $guard; exit $code'

wait_for() {  # although signals come
    while :; do
        wait "$1"; code=$?
        kill -0 "$1" 2> /dev/null || return $code
    done
}

run_agent() {
    pipe=$(mktemp -u)
    command=$(printf '%q ' bash -c "$remote" agent {{ folder }} "${train[@]}" --node "$1/{% raw %}${#hosts[@]}{% endraw %}" --address {{ address }})
    while :; do
        mkfifo -m 600 "$pipe"
        ssh "$2" "$command" < "$pipe" & client=$!
        exec 4> "$pipe"; rm "$pipe"; echo "$secret" >&4
        trap 'exec 4>&-' TERM
        wait_for $client; code=$?
        [ $code = 255 ] || exit $code
        echo "the connection to $2 was lost; trying again in 5 s"
        sleep 5
    done
}

agents=()
for index in "${!hosts[@]}"; do
    run_agent "$index" "${hosts[$index]}" &
    agents+=($!)
done
trap 'kill "${agents[@]}" 2> /dev/null' INT TERM
for agent in "${agents[@]}"; do
    wait_for "$agent"; codes+=($?)
done
exit "${codes[0]}"
