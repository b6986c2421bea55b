// LangChain.js against the server at BASE_URL: streams, calls tools, parses, sees errors.
import { ChatOpenAI } from "@langchain/openai";

const documents = ["a", "b"].map((id) => ({ id, text: `${id} says: ${id.repeat(200)}` }));
const model = (more) =>
  new ChatOpenAI({
    model: "emulated",
    apiKey: "k",
    maxRetries: 0,
    configuration: { baseURL: process.env.BASE_URL },
    modelKwargs: { documents, ...more },
  });
const said = { text: "" };

said.plain = (await model().invoke("Which?")).content;
for await (const piece of await model().stream("Which?")) said.text += piece.content;
const schema = { type: "object", properties: { name: { type: "string" } } };
const tool = { type: "function", function: { name: "look_up", parameters: schema } };
said.call = (await model().bindTools([tool]).invoke("Which?")).tool_calls[0].name;
const parsing = model().withStructuredOutput({ title: "city", ...schema }, { method: "jsonSchema" });
said.parsed = await parsing.invoke("Which?");
try {
  await model({ documents: 3 }).invoke("Which?");
} catch (error) {
  said.error = [error.constructor.name, error.status, error.type];
}
console.log(JSON.stringify(said));
