"""Answers chats with the model of the folder `animals`, on port 8000 of this machine: docs/tutorial-tune.md."""

import json
from http.server import BaseHTTPRequestHandler, HTTPServer

from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("animals")
model = AutoModelForCausalLM.from_pretrained("animals")


class Answer(BaseHTTPRequestHandler):
    def do_POST(self):
        messages = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        prompt = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(**prompt, max_new_tokens=20, do_sample=False, eos_token_id=tokenizer.eos_token_id)
        answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"role": "assistant", "content": answer.strip()}).encode())


HTTPServer(("127.0.0.1", 8000), Answer).serve_forever()
