"""The Python clients of two vendors, as their documents say: with the key from the environment."""

import anthropic
import openai

ASKED = [{"role": "user", "content": "say hello"}]

client = openai.OpenAI()
whole = client.chat.completions.create(model="some-model", messages=ASKED)
print("openai:", whole.choices[0].message.content)
parts = client.chat.completions.create(model="some-model", messages=ASKED, stream=True)
print("openai streams:", "|".join(part.choices[0].delta.content or "" for part in parts))

client = anthropic.Anthropic()
whole = client.messages.create(model="some-model", max_tokens=9, messages=ASKED)
print("anthropic:", whole.content[0].text)
with client.messages.stream(model="some-model", max_tokens=9, messages=ASKED) as stream:
    print("anthropic streams:", "|".join(stream.text_stream))
